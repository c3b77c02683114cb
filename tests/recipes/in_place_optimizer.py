"""A momentum optimizer as textbooks write it: the buffers are changed in place."""

import torch

import purestep as ps

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
batch = torch.randn(6, 4)


def momentum(lr, decay):
    def update(grads, opt_state, params, hyper=None):
        for name, grad in grads.items():
            opt_state[name].mul_(decay).add_(grad)
        return ps.map_leaves(lambda m: -lr * m, opt_state), opt_state

    return ps.Transformation(lambda params: ps.map_leaves(torch.zeros_like, params), update)


def loss(model, x, key):
    return ps.Loss(model(x).square().sum(), weight=len(x))


step = ps.compose(
    ps.split_batch(2), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(momentum(0.1, 0.9))
)
state = ps.init(model, step)
