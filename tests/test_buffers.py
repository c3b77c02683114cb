"""What becomes of buffers: untouched ones keep their bits, written ones follow the rule, zero weights add nothing."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import purestep as ps

from toys import same_bits

CPU = ps.devices.cpu()
ODD = [0.1, -0.0, 0.0, math.inf, -math.inf, math.nan, 1e-40, 3.4e38, 1 / 3]
DTYPES = {
    "float64": torch.tensor([*ODD, 1e308, 5e-324], dtype=torch.float64),
    "float32": torch.tensor(ODD),
    "float16": torch.tensor(ODD, dtype=torch.float16),
    "bfloat16": torch.tensor(ODD, dtype=torch.bfloat16),
    "complex64": torch.tensor([0.1 + 0.7j, -3j, 1e30 + 1e-30j], dtype=torch.complex64),
    "complex128": torch.tensor([0.1 + 0.7j, -3j, 1e300 + 1e-300j], dtype=torch.complex128),
    "int64": torch.tensor([0, 1, -1, 2**62 + 1, -(2**63), 2**63 - 1]),
    "int32": torch.tensor([0, 7, -(2**31), 2**31 - 1], dtype=torch.int32),
    "uint8": torch.tensor([0, 7, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
}


class Holder(nn.Module):
    """One weight, one buffer, and what its forward makes of the buffer."""

    def __init__(self, buffer, change=None):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("held", buffer.clone())
        self.change = change

    def forward(self, x):
        if self.change is not None:
            self.change(self, x)
        return (self.w * x[:, 0]).sum()


def held_after(module, weights, backend, *, buffers="mean"):
    """The buffer after one step over rows whose microbatches weigh ``weights``; row i of the batch holds i + 1."""
    count = len(weights)
    rows = torch.stack([torch.arange(1.0, count + 1), torch.as_tensor(weights).double()], dim=1).double()

    def loss(model, batch, key):
        return ps.Loss(model(batch[0]), weight=batch[1].sum())

    step = ps.compose(
        ps.split_batch(count), ps.forward(loss, module), ps.backward(), ps.accumulate(buffers=buffers),
        ps.step(ps.sgd(0.1)),
    )  # fmt: skip
    run = step if backend == "none" else ps.jit(step, device=CPU, backend=backend)
    state = ps.init(module, step)
    new, _ = run(state, (rows, torch.as_tensor(weights)))
    return state.buffers["held"], new.buffers["held"]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rule", ["mean", "sequential", "keep"])
@pytest.mark.parametrize("weights", [[3], [0.1], [0.3, 0.7, 1e-3], [7, 0, 3], [1, 2, 3, 4, 5, 6], [0.1] * 7])
def test_a_buffer_that_nobody_writes_keeps_its_bits(name, rule, weights):
    for backend in ("none", "aot_eager"):
        before, after = held_after(Holder(DTYPES[name]), weights, backend, buffers=rule)
        assert same_bits(before, after), backend
        if before.dtype.is_floating_point:
            assert torch.equal(torch.signbit(before), torch.signbit(after))


def replace(module, x):
    module.held = torch.full_like(module.held, 1.0) * x[0, 0].to(module.held.dtype)


def write(module, x):
    module.held.copy_(x[0, 0].to(module.held.dtype))


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("change", [replace, write])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("opening", [0.0, 5.0, math.inf, 1e30])
@pytest.mark.parametrize("weights", [[2], [1, 3], [1, 0, 2, 1, 4, 0]])
def test_a_written_buffer_becomes_the_weighted_mean(backend, change, dtype, opening, weights):
    module = Holder(torch.full((2,), opening).to(dtype), change)
    _, after = held_after(module, weights, backend)
    mean = sum(w * (i + 1) for i, w in enumerate(weights)) / sum(weights)
    assert after.dtype == dtype
    assert torch.allclose(after, torch.full((2,), mean).to(dtype), rtol=1e-15 if dtype == torch.float64 else 1e-7)


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("weights", [[2], [0.25, 0.5], [1, 0, 2, 1, 4, 0], [0.1] * 6])
@pytest.mark.parametrize("opening", [0, 41, 2**53 + 1])
def test_a_counter_moves_by_one(backend, weights, opening):
    module = Holder(torch.tensor([opening]), lambda m, x: m.held.add_(1))
    assert held_after(module, weights, backend)[1].tolist() == [opening + 1]


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_microbatch_of_weight_zero_adds_nothing_whatever_it_holds(backend, bad, place):
    def spoil(module, x):
        module.held = torch.where(x[0, 1] == 0, bad, 2.0).expand(2).to(module.held.dtype)

    weights = [1, 1, 1, 1, 1, 1]
    weights[place] = 0
    for dtype in (torch.float32, torch.float64):
        assert held_after(Holder(torch.zeros(2, dtype=dtype), spoil), weights, backend)[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_no_weight_at_all_keeps_the_buffer(backend):
    before, after = held_after(Holder(torch.tensor([0.1, 2.0]), write), [0, 0], backend)
    assert same_bits(before, after)


@given(
    st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=1, max_size=9), st.floats(-(2.0**100), 2.0**100, width=32)
)
def test_microbatches_that_agree_give_their_own_value(weights, value):
    module = Holder(torch.zeros(3), lambda m, x: m.held.fill_(value))
    assert same_bits(held_after(module, weights, "none")[1], torch.full((3,), value))


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_sequential_buffers_end_as_torch_would_have_them(backend):
    module = Holder(torch.tensor([0.5]), lambda m, x: m.held.mul_(0.9).add_(x[0, 0].to(m.held.dtype)))
    expected = torch.tensor([0.5])
    for i in range(6):
        expected.mul_(0.9).add_(float(i + 1))
    assert same_bits(held_after(module, [1, 2, 3, 4, 5, 6], backend, buffers="sequential")[1], expected)


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_a_function_that_makes_a_new_loss_keeps_the_buffers(backend):
    model = nn.BatchNorm1d(2)

    def loss(m, x, key):
        return ps.Loss(m(x).square().sum(), weight=len(x))

    def anew(loss):
        return ps.Loss(loss.total * 2.0, loss.weight)

    x = torch.arange(8.0).reshape(4, 2)
    made = []
    for functions in ((), (anew,)):
        step = ps.compose(
            ps.split_batch(2), ps.forward(loss, model), *functions, ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1))
        )
        run = step if backend == "none" else ps.jit(step, device=CPU, backend=backend)
        made.append(run(ps.init(model, step), x)[0].buffers)
    assert same_bits(made[0]["running_mean"], made[1]["running_mean"])
    assert float(made[1]["running_mean"].abs().sum()) > 0
    assert int(made[1]["num_batches_tracked"]) == 1
