"""Several steps in one call: to the bit what one after the other gives."""

import pytest
import torch

import purestep as ps

from toys import differing, mlp, mlp_step, rows_of, snapshot, toy_state, toy_step

CPU = ps.devices.cpu()
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def setup():
    model = mlp(dropout=0.3, norm=True)
    step = mlp_step(model, split=2)
    return step, ps.init(model, step), [rows_of(10, seed=i) for i in range(3)]


def one_by_one(step, state, batches):
    rows = []
    for batch in batches:
        state, metrics = step(state, batch)
        rows.append(metrics)
    return state, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_eagerly_it_is_a_loop():
    step, state, batches = setup()
    before = snapshot(state)
    assert differing(ps.scan_steps(step, 3)(state, batches), one_by_one(step, state, batches)) == []
    assert differing(before, snapshot(state)) == []


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_it_gives_the_bits_of_the_compiled_step(backend, donate):
    step, state, batches = setup()
    many = ps.jit(ps.scan_steps(step, 3), device=CPU, backend=backend, donate=donate)
    one = ps.jit(step, device=CPU, backend=backend, donate=donate)
    result = many(ps.copy_state(state), batches)
    assert differing(result, one_by_one(one, ps.copy_state(state), batches)) == []
    again = many(result[0], batches)
    assert many.compiles == 1
    assert int(again[0].counters.updates) == 6
    assert again[1]["loss"].shape == (3,)


def test_a_donated_state_is_given_up_and_another_kept():
    step, state, batches = setup()
    kept = ps.copy_state(state)
    donating, keeping = (
        ps.jit(ps.scan_steps(step, 3), device=CPU, backend="aot_eager", donate=donate) for donate in (True, False)
    )
    keeping(kept, batches)
    donating(state, batches)
    with pytest.raises(ps.DonatedError):
        _ = state.params
    assert int(kept.counters.updates) == 0


def test_arrays_are_placed_and_lists_of_other_lengths_or_forms_refused():
    step, state, batches = setup()
    many = ps.jit(ps.scan_steps(step, 3), device=CPU, backend="aot_eager")
    arrays = [tuple(leaf.numpy() for leaf in batch) for batch in batches]
    assert differing(many(state, arrays), many(state, tuple(batches))) == []
    with pytest.raises(ps.BatchError, match="batches must be 3"):
        many(state, batches[:2])
    with pytest.raises(ps.BatchError, match="list of 3 batches, got Tensor"):
        many(state, torch.ones(3, 2))
    with pytest.raises(ps.BatchError, match=r"batches\[2\] has another form"):
        many(state, [*batches[:2], rows_of(8)])
    assert many.compiles == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_a_fault_stops_at_its_step_and_hands_out_the_state_before_it(jitted):
    """A weight that float32 cannot be divided by, in the third of four batches."""

    def loss(w, batch, key):
        return ps.Loss((w * batch["x"]).sum(), weight=batch["weight"])

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(torch.zeros((), dtype=torch.float64), step)
    weights = [1.0, 2.0, float("nan"), 1.0]
    batches = [{"x": torch.ones(2, dtype=torch.float64), "weight": torch.tensor(w)} for w in weights]
    many = ps.scan_steps(step, 4)
    run = ps.jit(many, device=CPU, backend="aot_eager", donate=True) if jitted else many
    with pytest.raises(ps.NumericsError, match="step 2 of 4") as caught:
        run(ps.copy_state(state), batches)
    expected, _ = one_by_one(step, state, batches[:2])
    assert differing(caught.value.state, expected) == []


def test_a_fault_in_the_first_step_leaves_the_given_state():
    step = toy_step(lambda count: count * float("nan"))
    state = toy_state(step)
    run = ps.jit(ps.scan_steps(step, 2), device=CPU, backend="aot_eager", donate=True)
    with pytest.raises(ps.NumericsError, match="hyperparameter"):
        run(state, [torch.ones(2, dtype=torch.float64)] * 2)
    assert float(state.params) == 0.0


def test_a_batch_that_views_the_donated_state_is_refused_wherever_it_stands():
    step = toy_step()
    state = toy_state(step)
    run = ps.jit(ps.scan_steps(step, 2), device=CPU, backend="aot_eager", donate=True)
    good = torch.ones(1, dtype=torch.float64)
    state, _ = run(state, [good, good])
    with pytest.raises(ps.BatchError, match="shares its storage"):
        run(state, [good, state.params.view(1)])
    with pytest.raises(ps.BatchError, match="shares its storage"):
        run(state, [state.params.view(1), good])


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (2.0, ValueError), (True, ValueError)])
def test_counts_are_checked(count, error):
    with pytest.raises(error, match="count"):
        ps.scan_steps(toy_step(), count)


def test_only_a_step_is_taken():
    with pytest.raises(TypeError, match=r"ps\.compose"):
        ps.scan_steps(lambda state, batch: (state, {}), 2)


def test_several_steps_are_no_step_to_the_kit_and_the_benchmark():
    step = toy_step()
    many = ps.jit(ps.scan_steps(step, 2), device=CPU, backend="aot_eager")
    with pytest.raises(TypeError, match="JittedScan"):
        ps.properties.assert_pure(many, toy_state(step), torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="JittedScan"):
        ps.benchmark(many, toy_state(step), torch.ones(2, dtype=torch.float64))
