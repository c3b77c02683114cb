"""purestep: the step composed, compiled whole, its state donated."""

from torch.nn import functional

import purestep as ps

from workloads import CLIP, DECAY, RATE

__all__ = ["scanned", "setup", "step_of"]


def setup(workload):
    """The composed step and its first state."""
    model = workload.make()
    cut = [ps.split_batch(workload.micro)] if workload.micro > 1 else []
    step = ps.compose(
        *cut,
        ps.forward(loss, model),
        ps.backward(),
        ps.accumulate(),
        ps.clip(max_norm=CLIP),
        ps.step(ps.adamw(RATE, weight_decay=DECAY)),
    )
    return step, ps.init(model, step, seed=0)


def loss(model, batch, key):
    """Cross entropy as a sum over rows or tokens, with their number."""
    x, y = batch
    total = functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
    return ps.Loss(total, weight=y.numel())


def step_of(workload, *, donate=True):
    """``step(batch) -> loss``."""
    step, state = setup(workload)
    fast = ps.jit(step, donate=donate, device=ps.devices.cpu())
    held = [state]

    def one(batch):
        held[0], metrics = fast(held[0], batch)
        return metrics["loss"]

    return one


def scanned(workload):
    """``steps(batches) -> last loss``: several steps in one call."""
    step, state = setup(workload)
    fast = ps.jit(ps.scan_steps(step, workload.steps), donate=True, device=ps.devices.cpu())
    held = [state]

    def many(batches):
        held[0], metrics = fast(held[0], batches)
        return metrics["loss"][-1]

    return many
