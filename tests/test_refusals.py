"""What is refused: by name, with what to do, and with the old state still usable."""

import math

import attrs
import pytest
import torch
from torch import nn

import purestep as ps

from toys import classifier_loss, differing, mlp, mlp_step, rows_of, snapshot, toy_loss, toy_state, toy_step

CPU = ps.devices.cpu()
X = torch.ones(4, dtype=torch.float64)


@pytest.fixture(params=["none", "eager", "aot_eager"])
def run_of(request):
    """A step run eagerly, or by jit with donation: a refusal must not use up the state."""
    return lambda step: (
        step if request.param == "none" else ps.jit(step, device=CPU, backend=request.param, donate=True)
    )


BAD_BATCHES = {
    "empty": (torch.zeros(0), "the batch is empty: batch has 0 rows"),
    "no tensors": ({"a": None}, "no tensor with rows"),
    "disagree": ({"x": torch.ones(4), "y": torch.ones(3)}, r"batch\['x'\] has 4, batch\['y'\] has 3"),
    "few": (torch.ones(1), r"split_batch\(2\): the batch has 1 rows, fewer than microbatches"),
    "grad": ({"x": torch.ones(4, requires_grad=True)}, r"batch\['x'\] requires a gradient"),
    "device": ({"x": torch.ones(4, device="meta")}, r"batch\['x'\] lies on meta"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches(name, run_of):
    batch, message = BAD_BATCHES[name]

    def loss(w, batch, key):
        x = batch if isinstance(batch, torch.Tensor) else batch["x"]
        return ps.Loss((w * x).sum(), weight=len(x))

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = toy_state(step)
    before = snapshot(state)
    with pytest.raises(ps.BatchError, match=message):
        run_of(step)(state, batch)
    assert differing(before, snapshot(state)) == []
    assert float(step(state, X)[0].params) == -1.0


BAD_LOSSES = {
    "bare": (lambda w, x: (w * x).sum(), "returned a bare tensor.*weight is not known"),
    "number": (lambda w, x: 3.0, "must return a ps.Loss, got float"),
    "mean": (lambda w, x: ps.Loss((w * x).mean()), "weight is missing"),
    "vector": (lambda w, x: ps.Loss(w * x, weight=4), r"0-d tensor.*shape \(4,\)"),
    "integer": (lambda w, x: ps.Loss((w * x).sum().long(), weight=4), "real floating"),
    "no graph": (lambda w, x: ps.Loss((w * x).sum().detach(), weight=4), "does not depend on the params"),
    "other graph": (
        lambda w, x: ps.Loss(torch.ones((), requires_grad=True) * x.sum(), weight=4), "depends on none of the params",
    ),
    "negative": (lambda w, x: ps.Loss((w * x).sum(), weight=-1), "finite and not negative, got -1"),
    "nan": (lambda w, x: ps.Loss((w * x).sum(), weight=math.nan), "finite and not negative, got nan"),
    "vector weight": (lambda w, x: ps.Loss((w * x).sum(), weight=x), "weight must be a real 0-d tensor"),
    "metric": (lambda w, x: ps.Loss((w * x).sum(), 4, metrics={"m": x.mean()}), r"metrics\['m'\] must be ps.Sum"),
    "reserved": (lambda w, x: ps.Loss((w * x).sum(), 4, metrics={"lr": ps.Sum(1.0, 1)}), "lr are reported by the step"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_losses(name, run_of):
    fn, message = BAD_LOSSES[name]
    step = ps.compose(ps.forward(lambda w, x, key: fn(w, x)), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = toy_state(step)
    before = snapshot(state)
    with pytest.raises((ps.LossError, ps.TraceError), match=message):
        run_of(step)(state, X)
    assert differing(before, snapshot(state)) == []


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_are_tensors(weight, run_of):
    """Found in the graph, raised outside of it: nothing changes, and a donated state is not used up."""

    def loss(w, batch, key):
        return ps.Loss((w * batch["x"]).sum(), weight=batch["weight"])

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = toy_state(step)
    before, run = snapshot(state), run_of(step)
    with pytest.raises(ps.NumericsError, match="a weight is negative.*state before the call still stands"):
        run(state, {"x": X, "weight": torch.tensor(weight)})
    assert differing(before, snapshot(state)) == []
    assert float(run(state, {"x": X, "weight": torch.tensor(4.0)})[0].params) == -1.0


def test_a_rate_that_becomes_non_finite(run_of):
    step = toy_step(lr=lambda count: 1.0 / (1.0 - count.double()))
    run, state = run_of(step), toy_state(step)
    state, _ = run(state, X)
    before = snapshot(state)
    with pytest.raises(ps.NumericsError, match=r"out of its range \(lr = inf"):
        run(state, X)
    assert differing(before, snapshot(state)) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.sgd(math.nan), "lr must be finite"),
        (lambda: ps.adamw(math.inf), "lr must be finite"),
        (lambda: ps.constant_schedule(math.nan), "value must be a finite number"),
        (lambda: ps.clip(max_norm=-1.0), "max_norm must be a positive number, got -1.0"),
        (lambda: ps.clip(max_norm=0.0), "max_norm must be a positive number, got 0.0"),
        (lambda: ps.clip(max_norm=math.nan), "max_norm must be a positive number, got nan"),
        (lambda: ps.split_batch(0), "count must be a positive int, got 0"),
        (lambda: ps.accumulate("ring"), "order must be"),
        (lambda: ps.accumulate(buffers="max"), r"buffers\['\*'\] must be"),
        (lambda: ps.devices.cpu(threads=0), "threads must be a positive int, got 0"),
        (lambda: ps.concern(lambda s: s, slot="ema"), "slot and init go together"),
    ],
)
def test_arguments(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("concerns", "message"),
    [
        ((), "forward and backward and accumulate and step are missing"),
        ((ps.forward(toy_loss),), "backward and accumulate and step are missing"),
        ((ps.forward(toy_loss), ps.backward(), ps.accumulate()), "step is missing"),
        ((ps.forward(toy_loss), ps.backward(), ps.step(ps.sgd(1.0))), "accumulate is missing before OptimizerStep"),
        ((ps.forward(toy_loss), ps.backward(), ps.clip(max_norm=1.0)), "accumulate is missing before Clip"),
        ((ps.backward(),), "forward is missing before Backward"),
        ((ps.forward(toy_loss), ps.split_batch(2)), "SplitBatch takes a batch.*too late or twice"),
        (
            (ps.forward(toy_loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)), ps.clip(max_norm=1.0)),
            "Clip takes a grads.*too late or twice",
        ),
        ((ps.sgd(1.0),), "neither a concern nor a function"),
        ((torch.nn.Linear(1, 1),), "neither a concern nor a function"),
        ((ps.concern(lambda b, s: (b, s), slot="a", init=lambda p: p),), "stands before accumulate"),
    ],
)
def test_orders(concerns, message):
    with pytest.raises(ps.ComposeError, match=message):
        ps.compose(*concerns)


def test_two_slots_of_one_name():
    own = ps.concern(lambda s, e: (s, e), slot="ema", init=lambda p: p)
    with pytest.raises(ps.ComposeError, match="two concerns declare a slot named 'ema'"):
        ps.compose(
            ps.forward(toy_loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)), own, own,
        )  # fmt: skip


def test_functions_that_return_another_kind(run_of):
    for place, fn, message in (
        (1, lambda loss: 1.0, "must return one, got 1.0"),
        (2, lambda sums: None, "must return one, got None"),
        (3, lambda grads: 1.0, "returned 1.0 among the gradients where a tensor is needed"),
        (4, lambda state: state.params, "TrainState flows and must return one"),
    ):
        line = [ps.forward(toy_loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0))]
        line.insert(place, fn)
        step = ps.compose(*line)
        with pytest.raises(ps.ComposeError, match=message):
            run_of(step)(toy_state(step), X)


def test_functions_that_change_the_form_of_the_state(run_of):
    for fn, message in (
        (lambda s: s.replace(params=s.params.float()), r"state.params was float64\[\] on cpu and is now float32"),
        (
            lambda s: s.replace(params=s.params.expand(2)),
            r"state.params was float64\[\] on cpu and is now float64\[2\]",
        ),
        (lambda s: s.replace(params={"w": s.params}), "another form than it had: missing state.params"),
    ):
        step = ps.compose(ps.forward(toy_loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)), fn)
        state = toy_state(step)
        with pytest.raises(ps.StateError, match=message):
            run_of(step)(state, X)
        assert float(state.params) == 0.0


def test_states_that_do_not_fit(run_of):
    model, batch = mlp(norm=True), rows_of(4)
    step = mlp_step(model)
    state, run = ps.init(model, step), run_of(step)
    missing = {name: p for name, p in state.params.items() if name != "0.bias"}
    for bad, message in (
        (state.params, "must be a TrainState, got dict; make the state with ps.init"),
        (state.replace(opt_state=None), "no slot 'opt_state', which OptimizerStep needs; make the state with"),
        (state.replace(params=missing), r"missing state.params\['0.bias'\]"),
        (state.replace(params={**state.params, "x": X}), r"unexpected state.params\['x'\]"),
        (state.replace(params={**state.params, "0.bias": torch.ones(3)}), r"'0.bias'\] was .*\[8\].* now .*\[3\]"),
        (state.replace(buffers={}), r"missing state.buffers\['1.num_batches_tracked'\]"),
        (state.replace(key=7), "state.key is 7, a Python value, where a tensor is needed"),
        (state.replace(counters=attrs.asdict(state.counters) and _counters(state, 3)), "updates is 3, a Python value"),
        (state.replace(counters=_counters(state, torch.tensor(3.0))), "must be 0-d int64, got torch.float32"),
        (state.replace(params={n: p.requires_grad_() for n, p in ps.copy_state(state).params.items()}), "detach it"),
    ):
        with pytest.raises(ps.StateError, match=message):
            run(bad, batch)
    run(state, batch)


def _counters(state, updates):
    old = state.counters
    return ps.Counters(updates, old.batches, old.samples, old.skips, old.epochs)


def test_a_slot_that_a_concern_declares(run_of):
    line = [ps.forward(toy_loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0))]
    plain = ps.compose(*line)
    averaged = ps.compose(*line, ps.concern(lambda s, mean: (s, mean), slot="ema", init=lambda params: params))
    with pytest.raises(ps.StateError, match=r"no slot 'ema', which Custom needs; .* ps.init\(model, step\)"):
        run_of(averaged)(toy_state(plain), X)


def test_models_that_cannot_be_trained():
    step = toy_step()
    lazy = nn.Sequential(nn.LazyLinear(3))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for make, message in (
        (lambda: ps.forward(classifier_loss, lazy), "parameter 0.weight is lazy"),
        (lambda: ps.init(lazy, step), "parameter 0.weight is lazy"),
        (lambda: ps.init({"a": 1.0}, step), "found 1.0 of type float"),
        (lambda: ps.init({}, step), "no params"),
        (lambda: ps.init(torch.ones(1, device="meta"), step), "meta device"),
        (lambda: ps.init(torch.ones(2, dtype=torch.int64), step), "no leaf of the params is trainable"),
        (lambda: ps.init(frozen, mlp_step(frozen)), "no leaf of the params is trainable"),
        (lambda: ps.init(_overlapping(), step), "a and b share memory but are two tensors"),
        (lambda: ps.init(nn.Linear(2, 3), mlp_step(mlp())), "does not fit the module of this step: missing"),
    ):
        with pytest.raises(ps.StateError, match=message):
            make()
    with pytest.raises(TypeError, match="seed must be an int, got '1'"):
        ps.init(torch.ones(()), step, seed="1")
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got dict"):
        ps.forward(classifier_loss, {})
    with pytest.raises(TypeError, match=r"loss must take \(model, batch, key\)"):
        ps.forward(lambda model: None)


def _overlapping():
    model, whole = nn.Module(), torch.ones(4)
    model.a, model.b = nn.Parameter(whole[:3]), nn.Parameter(whole[1:])
    return model


def test_loading_names_what_is_missing_unknown_or_of_another_form():
    model = mlp(norm=True)
    step = mlp_step(model)
    state, values = ps.init(model, step), model.state_dict()
    short = {name: value for name, value in values.items() if name != "0.weight"}
    for bad, message in (
        (short, r"missing state_dict\['0.weight'\]"),
        ({**values, "new": X}, r"unexpected state_dict\['new'\]"),
        (
            {**values, "0.bias": torch.ones(3)},
            r"state_dict\['0.bias'\] was float32\[8\] on cpu and is now float32\[3\]",
        ),
        ({**values, "0.bias": torch.ones(8).double()}, r"\['0.bias'\] was float32.* now float64"),
        ({**values, "0.bias": 1.0}, "a Python value where a tensor is needed"),
    ):
        with pytest.raises(ps.StateError, match=message):
            ps.load_state_dict(state, bad)
    loaded = ps.load_state_dict(state, {name: value.clone() for name, value in values.items()})
    assert differing(loaded, state) == []


def test_random_operations_without_a_keyed_form_are_named(run_of):
    for draw, message in (
        (lambda x: torch.nn.functional.rrelu(x, training=True), "rrelu_with_noise.* has no keyed form"),
        (lambda x: x * torch.rand(4, generator=torch.Generator()), "a torch.Generator of its own"),
        (lambda x: torch.empty(4).geometric_(0.5) * x, "geometric.* has no keyed form"),
    ):
        step = ps.compose(
            ps.forward(lambda w, x, key, draw=draw: ps.Loss((w * draw(x)).sum(), len(x))), ps.backward(), ps.accumulate(),
            ps.step(ps.sgd(1.0)),
        )  # fmt: skip
        state = toy_state(step)
        with pytest.raises(ps.RandomOpError, match=message):
            run_of(step)(state, X)
        assert float(state.params) == 0.0


def test_a_random_loss_without_a_key_is_refused():
    forward = ps.forward(lambda w, x, key: ps.Loss((w * torch.rand(4)).sum(), 4))
    with pytest.raises(ps.RandomOpError, match="no key was given"):
        forward(torch.ones(()), X)
