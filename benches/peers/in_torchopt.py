"""TorchOpt: its chain of functional transformations behind its optimizer class."""

import torchopt

from workloads import CLIP, DECAY, RATE, mean_loss

__all__ = ["step_of"]


def step_of(workload):
    """``step(batch) -> loss``."""
    model = workload.make()
    chain = torchopt.chain(
        torchopt.clip.clip_grad_norm(CLIP), torchopt.adamw(RATE, weight_decay=DECAY, use_accelerated_op=True)
    )
    optimizer = torchopt.Optimizer(model.parameters(), chain)

    def step(batch):
        total = 0.0
        optimizer.zero_grad()
        for part in zip(*(leaf.chunk(workload.micro) for leaf in batch), strict=True):
            loss = mean_loss(model, part) / workload.micro
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step
