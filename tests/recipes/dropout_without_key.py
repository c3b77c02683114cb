"""A hand-written dropout, its mask drawn by NumPy from the process's own generator."""

import numpy as np
import torch

import purestep as ps

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
batch = torch.randn(6, 4)


def loss(model, x, key):
    mask = torch.from_numpy((np.random.rand(*x.shape) > 0.1).astype("float32"))
    return ps.Loss(model(x * mask).square().sum(), weight=len(x))


step = ps.compose(ps.split_batch(2), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
state = ps.init(model, step)
