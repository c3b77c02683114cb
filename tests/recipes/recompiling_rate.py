"""A warm-up computed by the loop and handed to the step as a Python number."""

import torch

import purestep as ps

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
x = torch.randn(6, 4)


def loss(model, batch, key):
    return ps.Loss(model(batch["x"]).square().sum() * batch["rate"], weight=len(batch["x"]))


step = ps.compose(ps.split_batch(2), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
state = ps.init(model, step)
batches = [{"x": x, "rate": 0.1 * min(1.0, n / 10)} for n in range(1, 5)]
