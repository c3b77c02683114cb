"""Hypothesis strategies that the tests share."""

import hypothesis.strategies as st
import torch

import purestep as ps

from toys import mlp, mlp_step, rows_of

backends = st.sampled_from(["eager", "aot_eager"])
seeds, cuts = ps.strategies.seeds, ps.strategies.cuts
orders = st.sampled_from(["tree", "fold"])
finite = st.floats(min_value=-8, max_value=8, allow_nan=False, allow_subnormal=False, width=32)


def shapes(max_dims=3, max_side=4):
    return st.lists(st.integers(1, max_side), max_size=max_dims).map(tuple)


@st.composite
def setups(draw):
    """A composed step over a generated set-up, its state and a batch with ragged weights (some labels are masked)."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    model = mlp(draw(st.sampled_from([0.0, 0.3])), dtype, norm=draw(st.booleans()))
    if draw(st.booleans()):
        model[0].requires_grad_(False)
    optimizer = draw(
        st.sampled_from(
            [
                ps.sgd(0.1),
                ps.sgd(ps.linear(0.1, 0.0, 5), momentum=0.9, nesterov=True, weight_decay=0.01),
                ps.adam(1e-2, amsgrad=True),
                ps.adamw(ps.warmup_cosine(peak=1e-2, warmup=2, total=9)),
            ]
        )
    )
    step = mlp_step(
        model,
        split=draw(st.sampled_from([None, 1, 2, 3, 7])),
        order=draw(orders),
        clip=draw(st.booleans()),
        optimizer=optimizer,
        buffers=draw(st.sampled_from(["mean", "sequential", "keep"])),
    )
    x, y = rows_of(14, dtype, seed=draw(st.integers(0, 5)))
    y[draw(st.integers(0, 14)) :] = -100
    return step, ps.init(model, step, seed=draw(seeds)), (x, y)
