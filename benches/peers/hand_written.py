"""A training loop written by hand in PyTorch: eager, with the fused optimizer, and with ``torch.compile``."""

import torch
from torch import nn

from workloads import CLIP, DECAY, RATE, mean_loss

__all__ = ["compiled", "compiled_whole", "eager", "fused"]


def eager(workload):
    """As in most scripts: nothing is compiled, the optimizer works in place (in groups of parameters, torch's default)."""
    return _loop(workload, workload.make(), fused=False)


def fused(workload):
    """The same with AdamW as one kernel."""
    return _loop(workload, workload.make(), fused=True)


def compiled(workload):
    """The model compiled, forward and backward; AdamW as one kernel."""
    return _loop(workload, torch.compile(workload.make()), fused=True)


def compiled_whole(workload):
    """The model compiled, and clipping with the optimizer's step compiled too, its rate a tensor."""
    model = torch.compile(workload.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(RATE), weight_decay=DECAY)

    @torch.compile
    def update():
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return _train(workload, model, optimizer, update)


def _loop(workload, model, *, fused):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused or None)
    params = list(model.parameters())

    def update():
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()

    return _train(workload, model, optimizer, update)


def _train(workload, model, optimizer, update):
    def step(batch):
        total = 0.0
        for part in zip(*(leaf.chunk(workload.micro) for leaf in batch), strict=True):
            loss = mean_loss(model, part) / workload.micro
            loss.backward()
            total = total + loss.detach()
        update()
        optimizer.zero_grad()
        return total

    return step
