"""The contract that every device enters; add a new one to ``DEVICES``."""

import contextlib

import numpy as np
import pytest
import torch

import purestep as ps

from toys import differing, mlp, mlp_step, rows_of, snapshot

DEVICES = {"cpu": ps.devices.cpu, "cpu with a thread": lambda: ps.devices.cpu(threads=1)}


@pytest.fixture(params=DEVICES)
def device(request):
    return DEVICES[request.param]()


def test_is_a_device(device):
    assert isinstance(device, ps.Device)
    assert device.name
    assert 0 <= device.rank < device.world


def test_places_a_tree_without_changing_it(device):
    tree = {"x": torch.ones(3), "n": np.arange(3.0), "other": ("text", None, 2)}
    before = snapshot(tree)
    placed = device.place(tree)
    assert differing(before, snapshot(tree)) == []
    assert isinstance(tree["n"], np.ndarray)
    assert torch.equal(placed["n"].cpu(), torch.arange(3.0, dtype=torch.float64))
    assert placed["other"] == ("text", None, 2)


def test_refuses_a_leaf_that_lies_elsewhere(device):
    with pytest.raises(ps.BatchError, match=r"batch\['x'\] lies on meta"):
        device.place({"x": torch.ones(3, device="meta")})


def test_reduces_to_the_sums_over_all_processes(device):
    model = mlp()
    step = mlp_step(model)
    sums = step.phases[0].local(ps.init(model, step), rows_of(4))
    reduced = device.reduce(sums)
    assert int(reduced.weight) == 4 * device.world
    assert reduced.grads.keys() == sums.grads.keys()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_runs_the_step_with_the_eager_bits(device, backend):
    model, batch = mlp(dropout=0.3, norm=True), rows_of(10)
    step = mlp_step(model, split=2)
    state = ps.init(model, step)
    fast = ps.jit(step, device=device, backend=backend)
    assert differing(step(state, batch), fast(state, batch)) == []


def test_settings_of_the_machine_are_put_back(device):
    torch.set_num_threads(2)
    with device.running():
        pass
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError, match="inside"), device.running():
        raise RuntimeError("inside")
    assert torch.get_num_threads() == 2


def test_threads_hold_for_the_time_of_a_step():
    seen = []

    def loss(w, x, key):
        seen.append(torch.get_num_threads())
        return ps.Loss((w * x).sum(), weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    torch.set_num_threads(2)
    ps.jit(step, device=ps.devices.cpu(threads=1), backend="eager")(ps.init(torch.zeros(()), step), torch.ones(2))
    assert (seen, torch.get_num_threads()) == ([1], 2)


def test_numpy_batches_train(device):
    step = ps.compose(
        ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), len(x))),
        ps.backward(),
        ps.accumulate(),
        ps.step(ps.sgd(1.0)),
    )
    state = ps.init(torch.zeros((), dtype=torch.float64), step)
    new, _ = ps.jit(step, device=device, backend="aot_eager")(state, np.array([1.0, 3.0]))
    assert float(new.params) == -2.0


def test_a_device_that_cannot_be_traced_is_refused_by_jit_for_now():
    step = ps.compose(
        ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), len(x))),
        ps.backward(),
        ps.accumulate(),
        ps.step(ps.sgd(1.0)),
    )
    with pytest.raises(ps.CompileError, match="device between cannot be traced"):
        ps.jit(step, device=_Untraceable())(ps.init(torch.zeros(()), step), torch.ones(2))


class _Untraceable:
    name, rank, world, synchronous, traceable = "between", 0, 1, True, False

    def place(self, tree):
        return tree

    def reduce(self, sums):
        return sums

    def running(self):
        return contextlib.nullcontext()
