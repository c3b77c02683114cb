"""The kit of properties: what it says of a fault, what it says of a good step, and that it tells one from the other."""

import itertools
import math

import hypothesis.strategies as st
import mutants
import pytest
import torch
from hypothesis import given
from mutants import GOOD, MUTANTS, ask, batch_of, setup

import purestep as ps
from purestep.core.properties.difference import first_difference, ulp_distance

from toys import toy_loss, toy_step

CPU = ps.devices.cpu()
properties = ps.properties


@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_fault_is_caught_by_its_property(name, monkeypatch):
    monkeypatch.setenv("PLANTED", "")  # one of them sets it
    wanted, make = MUTANTS[name]
    (result,) = ask(wanted, make()).results
    assert result.verdict == "fails", result
    assert result.why.startswith("not ")


@pytest.mark.parametrize("name", GOOD)
def test_a_good_step_holds_everything(name):
    report = ask("", GOOD[name]())
    assert {result.verdict for result in report.results} == {"holds"}, str(report)


def test_no_false_alarm_over_two_hundred_runs():
    """Twenty set-ups and batches of each of ten seeds."""
    step = toy_step(0.1, ps.clip(max_norm=1.0), split=4)
    states = ps.strategies.states(lambda seed: ps.init(torch.zeros((), dtype=torch.float64), step, seed=seed))
    batches = ps.strategies.batches(torch.zeros(8, dtype=torch.float64))
    for question in (
        properties.assert_pure, properties.assert_deterministic, properties.assert_spec_stable,
        properties.assert_key_used, properties.assert_spread_invariant, properties.assert_cut_invariant,
        properties.assert_gradients,
    ):  # fmt: skip
        question(step, states, batches, examples=200)


@pytest.mark.inductor
def test_no_false_alarm_over_five_inductor_runs():
    found = setup(dropout=0.3)
    fast = ps.jit(found.step, device=CPU)
    for _ in range(5):
        properties.assert_deterministic(fast, found.state, found.batch, runs=2)
    properties.assert_compiles_once(fast, found.state, [batch_of()] * 3)
    properties.assert_compiled_matches_eager(fast, found.state, found.batch, ulps=2**10, steps=1)
    properties.assert_resumable(fast, found.state, [batch_of()] * 3)


def test_a_failure_names_concern_leaf_element_values_distance_and_the_smallest_input():
    def flaw(grads):  # wrong for large gradients only
        return torch.where(grads.abs() > 1.0, grads * (1.0 + torch.rand(())), grads)

    draws = iter(range(10**9))

    def impure(grads):
        return flaw(grads) if next(draws) % 2 else grads

    step = ps.compose(ps.forward(toy_loss), ps.backward(), ps.accumulate(), impure, ps.step(ps.sgd(1.0)))
    state = ps.init(torch.zeros((), dtype=torch.float64), step)
    batches = ps.strategies.tensors((3,), torch.float64)
    with pytest.raises(properties.PropertyError) as caught:
        properties.assert_deterministic(step, state, batches, examples=100)
    error = caught.value
    assert error.property == "deterministic"
    assert error.concern.startswith("impure, in aten.")
    assert "test_kit.py" in error.concern
    assert error.difference.path == "state.params"
    assert error.difference.ulps > 0
    assert "smallest input found: {x = [" in str(error)
    smallest = [float(x) for x in error.smallest.split("[")[1].split("]")[0].split(",")]
    assert 1.0 < abs(sum(smallest)) / 3 <= 2.0


def test_distances_are_measured_against_the_neighbours():
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-9])}
    other = {"a": torch.tensor([1.0]), "b": torch.tensor([-1e-9])}
    assert first_difference(one, other).path == "state['b']"
    assert first_difference(one, other, ulps=1) is None
    assert first_difference(one["b"], other["b"], ulps=1) is not None


def test_the_first_difference_is_exact():
    one = {"a": torch.tensor([1.0, -0.0, math.nan]), "b": torch.arange(3)}
    assert first_difference(one, {"a": one["a"].clone(), "b": torch.arange(3)}) is None
    zero = first_difference(one, {**one, "a": torch.tensor([1.0, 0.0, math.nan])})
    assert (zero.path, zero.index, zero.ulps, zero.count) == ("state['a']", (1,), 0, 1)
    assert "state['b'][2]: 2 against 5" in str(first_difference(one, {**one, "b": torch.tensor([0, 1, 5])}))
    assert "float32[3] on cpu against float64[3] on cpu" in str(first_difference(one, {**one, "a": one["a"].double()}))
    assert "present against absent" in str(first_difference(one, {"a": one["a"]}))
    assert first_difference(torch.tensor([1j]), torch.tensor([1j + 1e-3])).index == (0, 0)


@given(
    st.floats(allow_nan=False, width=32), st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_the_ulp_distance_counts_the_numbers_between(value, steps, dtype):
    one = other = torch.tensor(value, dtype=dtype)
    taken = 0
    for _ in range(min(steps, 50)):
        further = torch.nextafter(other, torch.tensor(math.inf, dtype=dtype))
        if bool(torch.isinf(further)):
            break
        other, taken = further, taken + 1
    assert ulp_distance(one, other) == ulp_distance(other, one) == taken


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("place", ["before", "micro", "sums", "grads", "after"])
def test_the_explanation_names_the_concern_whose_output_differs_first(backend, place):
    def nudge(value):
        return ps.map_leaves(lambda x: x + 1e-3 if x.is_floating_point() else x, value)

    def keep(value):
        return ps.map_leaves(lambda x: x, value)

    def named(fn):
        def planted(value):
            return fn(value)

        return planted

    pairs = []
    for fn in (keep, nudge):
        extra = {place: (named(fn),)}
        if place == "grads":
            extra = {"grads": (ps.clip(max_norm=1.0), named(fn))}
        pairs.append(setup(**extra, split=2))
    one, other = (s.step if backend == "none" else ps.jit(s.step, device=CPU, backend=backend) for s in pairs)
    found = ps.explain_difference(one, pairs[0].state, pairs[0].batch, against=other)
    assert found.concern == "planted"
    assert ps.explain_difference(one, pairs[0].state, pairs[0].batch) is None


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_the_explanation_names_the_operation(backend):
    found = setup(split=2)
    moved = found.state.replace(params={**found.state.params, "0.bias": found.state.params["0.bias"] + 1e-3})
    step = found.step if backend == "none" else ps.jit(found.step, device=CPU, backend=backend)
    told = ps.explain_difference(step, found.state, found.batch, other_state=moved)
    assert told.concern == "forward"
    assert told.operation is None  # its inputs differed: no operation is to blame
    draws = iter(range(10**6))

    def drifting(grads):
        return ps.map_leaves(lambda g: g + float(next(draws)), grads)

    if backend == "none":
        told = ps.explain_difference(setup(grads=(drifting,)).step, found.state, found.batch)
        assert told.concern == "drifting"
        assert told.operation.startswith("aten.add.Tensor at test_kit.py:")


def test_the_explanation_names_an_operation_of_the_traced_graph():
    """An operation with a hidden state, which a graph calls anew in each run."""
    calls = itertools.count()

    @torch.library.custom_op("purestep_test::drift", mutates_args=())
    def drift(x: torch.Tensor) -> torch.Tensor:
        return x + next(calls)

    @drift.register_fake
    def _(x):
        return torch.empty_like(x)

    def drifting(grads):
        return {**grads, "0.bias": drift(grads["0.bias"])}

    found = setup(grads=(drifting,))
    for step in (found.step, ps.jit(found.step, device=CPU, backend="aot_eager")):
        told = ps.explain_difference(step, found.state, found.batch)
        assert (told.concern, told.difference.path) == ("drifting", "['grads']['0.bias']")
        assert told.operation.startswith("purestep_test.drift.default")


def test_strategies_are_taken_everywhere():
    found = setup(split=2)
    states, batches = st.just(found.state), ps.strategies.batches(found.batch, integers=(0, 2))
    many = st.lists(batches, min_size=2, max_size=3)
    properties.assert_no_leak(found.step, states, batches, examples=2)
    properties.assert_resumable(found.step, states, many, examples=2)
    properties.assert_compiles_once(found.step, states, many, device=CPU, examples=2)
    properties.assert_compiled_matches_eager(found.step, states, batches, device=CPU, examples=2, steps=1)
    bad = setup(mutants.alternating())
    with pytest.raises(properties.PropertyError, match="smallest input found"):
        properties.assert_resumable(bad.step, states, many, examples=5)


def test_the_explanation_follows_another_state_or_batch():
    found = setup(split=2)
    moved = found.state.replace(params={**found.state.params, "0.bias": found.state.params["0.bias"] + 1e-3})
    told = ps.explain_difference(found.step, found.state, found.batch, other_state=moved)
    assert told.concern == "forward"
    x, y = found.batch
    told = ps.explain_difference(found.step, found.state, found.batch, other_batch=(x + 1.0, y))
    assert told.concern == "split_batch"
    with pytest.raises(ValueError, match="do not have the same concerns"):
        ps.explain_difference(found.step, found.state, found.batch, against=setup(split=4).step)


def test_taps_do_not_move_a_bit():
    from purestep.core.properties.tape import TAP, tapped

    found = setup(dropout=0.5, norm=True, split=8, batch=batch_of(16))
    plain, tape = found.step(found.state, found.batch), tapped(found.step)(found.state, found.batch)
    assert first_difference(plain[0], tape[0]) is None
    taps = [name for name in tape[1] if name.startswith(TAP)]
    assert {name[len(TAP) + 7 :].split("\n")[0] for name in taps} >= {
        "split_batch", "forward", "backward", "accumulate", "clip", "optimizerstep",
    }  # fmt: skip


@given(ps.strategies.optimizers(), ps.strategies.seeds)
def test_every_optimizer_of_the_strategies_holds_what_is_cheap_to_ask(tx, seed):
    found = setup(tx=tx)
    state = found.state.replace(key=ps.random_key(seed))
    properties.assert_spec_stable(found.step, state, found.batch)
    properties.assert_spread_invariant(found.step, state, found.batch)


@given(ps.strategies.trees(), ps.strategies.trees())
def test_trees_are_compared_by_structure_and_bits(one, other):
    assert first_difference(one, ps.map_leaves(torch.clone, one)) is None
    same = [(p, x.tolist(), x.dtype) for p, x in _leaves(one)] == [(p, x.tolist(), x.dtype) for p, x in _leaves(other)]
    assert (first_difference(one, other) is None) == same


def _leaves(tree):
    from purestep.state.tree import leaves_with_paths

    return leaves_with_paths(tree)


LIKE = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))


@given(ps.strategies.batches(LIKE, rows=st.integers(1, 6), integers=(0, 2), masked=-100))
def test_batches_keep_their_form(batch):
    x, y = batch
    assert len(x) == len(y) and x.shape[1:] == (2,)  # noqa: PT018 (one form)
    assert set(y.tolist()) <= {0, 1, 2, -100}


@given(ps.strategies.ragged(), ps.strategies.ragged(packed=True), ps.strategies.limits(), ps.strategies.cuts(7))
def test_the_other_strategies_give_what_they_say(rows, packed, limits, sizes):
    assert {row.shape[1] for row in rows} == {2}
    assert packed.data.shape[1] == 2
    assert set(limits) == {"updates", "batches", "samples", "epochs"}
    assert sum(sizes) == 7


def test_what_cannot_be_asked_is_said():
    step = toy_step()
    state, x = ps.init(torch.zeros((), dtype=torch.float64), step), torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot be spread evenly over 2, 4 processes"):
        properties.assert_spread_invariant(step, state, x)
    with pytest.raises(ValueError, match="give the device"):
        properties.assert_compiles_once(step, state, [x])
    with pytest.raises(ValueError, match="no property 'purity'; there are pure, "):
        properties.check(step, state, x, only=["purity"])
    found = setup(lambda m, b, key: mutants.good_loss(m, (b[0] + 0.1 * ps.normal(key, b[0].shape), b[1]), key))
    with pytest.raises(properties.NotAskedError, match="draws random numbers from its key"):
        properties.assert_cut_invariant(found.step, found.state, found.batch)
    for counts in ((), (0, 1), (2,)):
        with pytest.raises(ValueError, match="at least two positive numbers"):
            properties.assert_cut_invariant(step, state, x, counts=counts)
    with pytest.raises(ValueError, match="powers of two"):
        properties.assert_spread_invariant(step, state, x, ranks=(3,))
    with pytest.raises(ValueError, match="runs must be at least 2"):
        properties.assert_deterministic(step, state, x, runs=1)
    with pytest.raises(TypeError, match="thread counts such as"):
        properties.assert_deterministic(step, state, x, threads=2)
    with pytest.raises(ValueError, match="at least two batches"):
        properties.assert_resumable(step, state, [x])
    with pytest.raises(ValueError, match="steps must be at least 4"):
        properties.assert_no_leak(step, state, x, steps=2)
    with pytest.raises(TypeError, match=r"step must come from ps\.compose or ps\.jit, got function"):
        properties.assert_pure(lambda s, b: (s, {}), state, x)
    with pytest.raises(TypeError, match="state must be a TrainState"):
        properties.check(step, x, state)
    with pytest.raises(TypeError, match="must be lists of names"):
        properties.check(step, state, x, only="pure")


@pytest.mark.parametrize("error", [ValueError, KeyError, ps.BatchError, RuntimeError])
def test_a_step_that_does_not_run_is_one_failing_row(error):
    def loss(w, x, key):
        raise error("from the loss")

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    report = properties.check(step, ps.init(torch.zeros(()), step), torch.ones(2))
    assert [(r.name, r.verdict) for r in report.results] == [("runs", "fails")]
    assert not report.ok
    assert "from the loss" in report.results[0].why


def test_a_step_that_does_not_repeat_is_not_asked_what_compares_runs():
    report = ask("", MUTANTS["a generator of its own"][1]())
    verdicts = {result.name: result.verdict for result in report.results}
    assert verdicts["deterministic"] == "fails"
    assert {verdicts[name] for name in ("right in its gradients", "cut invariant", "resumable")} == {"not asked"}


@pytest.mark.parametrize("name", ["mean of means", "wrong tail divisor", "divide twice", "a mean for a sum"])
def test_dropout_hides_no_fault_of_the_cut(name):
    plain = MUTANTS[name][1]()
    drops = ps.forward(plain.step.phases[0].forward.loss, mutants.network(dropout=0.5))
    step = ps.compose(*(drops if isinstance(c, mutants.Forward) else c for c in plain.step.concerns))
    with pytest.raises(properties.PropertyError, match="not cut invariant"):
        properties.assert_cut_invariant(step, plain.state, plain.batch)


def float_logits(model, batch, key):
    logits = model(batch[0]).float()
    return ps.Loss(torch.nn.functional.cross_entropy(logits, batch[1], reduction="sum"), weight=len(batch[1]))


def halving_input(model, batch, key):
    x, y = batch
    return float_logits(model, (x.to(model[0].weight.dtype), y), key)


def halved_float_logits(model, batch, key):
    return float_logits(lambda x: model[4](mutants.Halved.apply(model[0](x)).tanh()), batch, key)


def with_weights(model, batch, key):
    weights = torch.tensor([1.0, 2.0, 3.0])
    return ps.Loss(
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1], weights, reduction="sum"), len(batch[1])
    )


def test_gradients_are_asked_of_losses_that_cast_and_of_params_in_half_precision():
    for loss in (float_logits, with_weights):
        found = setup(loss)
        properties.assert_gradients(found.step, found.state, found.batch)
    half = mutants.network().bfloat16()
    found = setup(halving_input, model=half)
    properties.assert_gradients(found.step, found.state, found.batch)
    properties.assert_cut_invariant(found.step, found.state, found.batch)
    found = setup(halved_float_logits)
    with pytest.raises(properties.PropertyError, match="right in its gradients"):
        properties.assert_gradients(found.step, found.state, found.batch)
    frozen = ps.constant(torch.ones(3))
    found = setup(lambda m, b, key: ps.Loss((m(b[0]) @ frozen).sum(), len(b[1])))
    with pytest.raises(properties.NotAskedError, match="does not run in float64"):
        properties.assert_gradients(found.step, found.state, found.batch)


def test_numpy_batches_and_results_are_compared_whole():
    import numpy as np

    found = setup()
    x, y = (leaf.numpy() for leaf in found.batch)
    assert properties.check(found.step, found.state, (x, y), device=CPU).ok
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    assert first_difference({"a": one}, {"a": other}).index == (2500,)
    assert properties.digests({"a": one}) != properties.digests({"a": other})


def test_batch_normalisation_hides_no_fault_of_the_cut():
    found = setup(mutants.mean_loss, norm=True, batch=batch_of(7))
    with pytest.raises(properties.PropertyError, match="not cut invariant"):
        properties.assert_cut_invariant(found.step, found.state, found.batch)


def test_rounding_of_a_cancelled_gradient_is_no_fault():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(4, 4), torch.nn.Flatten(), torch.nn.Linear(36, 2)
    )

    def loss(m, x, key):
        return ps.Loss(m(x).square().sum(), weight=len(x))

    step = ps.compose(ps.split_batch(2), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    properties.assert_cut_invariant(step, ps.init(model, step), torch.randn(8, 1, 5, 5), counts=(1, 2, 4))

    def squares(w, x, key):  # at its minimum the gradient is nothing but rounding
        return ps.Loss((w - x).square().sum(), weight=len(x))

    step = ps.compose(ps.split_batch(2), ps.forward(squares), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    x = torch.randn(64)
    properties.assert_cut_invariant(step, ps.init(x.mean(), step), x)


def test_a_batch_without_a_row_that_counts_is_not_asked():
    found = setup(batch=batch_of(8, masked=8))
    for question in (properties.assert_cut_invariant, properties.assert_gradients):
        with pytest.raises(properties.NotAskedError, match="the loss is"):
            question(found.step, found.state, found.batch)
    report = properties.check(found.step, found.state, found.batch, device=CPU)
    assert report.ok, str(report)


def test_python_values_that_a_loss_changes_are_named():
    first = {}

    def loss(w, x, key):
        scale = first.setdefault("scale", float(len(x)))
        return ps.Loss((w * x).sum() * scale, weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    with pytest.raises(properties.PropertyError, match="changed first, which the step's functions hold"):
        properties.assert_pure(step, ps.init(torch.zeros(()), step), torch.ones(2))


def test_a_child_that_fails_is_heard_at_once():
    def loss(w, x, key):
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            raise KeyError("only in the child")
        return ps.Loss((w * x).sum(), weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    with pytest.raises(properties.PropertyError, match="could not run the step: KeyError: 'only in the child'"):
        properties.assert_deterministic(step, ps.init(torch.zeros(()), step), torch.ones(2), processes=1)


def test_a_donating_step_is_asked_without_using_up_the_state():
    found = setup()
    fast = ps.jit(found.step, device=CPU, backend="aot_eager", donate=True)
    for question in (
        properties.assert_pure,
        properties.assert_deterministic,
        properties.assert_key_used,
        properties.assert_no_leak,
    ):
        question(fast, found.state, found.batch)
    assert int(found.state.counters.updates) == 0


def test_other_processes_and_thread_counts_are_asked():
    found = setup(dropout=0.3)
    properties.assert_deterministic(found.step, found.state, found.batch, processes=2, threads=(1, 2))
    batches = ps.strategies.batches(found.batch, integers=(0, 2))
    properties.assert_deterministic(found.step, st.just(found.state), batches, processes=1, examples=2)
    import os

    def loss(w, x, key):
        return ps.Loss((w * x).sum() * (os.getpid() % 1000 + 1.0), weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(torch.zeros((), dtype=torch.float64), step)
    with pytest.raises(properties.PropertyError, match="another process gave other bits"):
        properties.assert_deterministic(step, state, torch.ones(2, dtype=torch.float64), processes=1)

    def by_threads(w, x, key):
        return ps.Loss((w * x).sum() * float(torch.get_num_threads()), weight=len(x))

    step = ps.compose(ps.forward(by_threads), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    with pytest.raises(properties.PropertyError, match="with 2 threads instead of 1"):
        properties.assert_deterministic(step, state, torch.ones(2, dtype=torch.float64), threads=(1, 2))


def test_mutants_are_scored(capsys, monkeypatch):
    monkeypatch.setenv("PLANTED", "")
    assert mutants.main() == 0
    assert f"{len(MUTANTS)} of {len(MUTANTS)} planted faults caught" in capsys.readouterr().out
    assert len(MUTANTS) >= 25
