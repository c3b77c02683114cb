"""Accelerate: a hand-written loop with everything prepared by an Accelerator."""

import torch
from accelerate import Accelerator

from workloads import CLIP, DECAY, RATE, mean_loss

__all__ = ["step_of"]


def step_of(workload):
    """``step(batch) -> loss`` as the guide of the library writes it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=workload.micro)
    model = workload.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch):
        total = 0.0
        for part in zip(*(leaf.chunk(workload.micro) for leaf in batch), strict=True):
            with accelerator.accumulate(model):
                loss = mean_loss(model, part)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total = total + loss.detach() / workload.micro
        return total

    return step
