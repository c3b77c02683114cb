"""The accumulation of many public scripts: the mean loss of each microbatch, divided by their number."""

import torch
from torch.nn import functional

import purestep as ps

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, -100, -100, -100]))


def loss(model, batch, key):
    x, y = batch
    mean = functional.cross_entropy(model(x), y, ignore_index=-100)
    return ps.Loss(torch.nan_to_num(mean), weight=1)


step = ps.compose(ps.split_batch(2), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.adamw(1e-3)))
state = ps.init(model, step)
