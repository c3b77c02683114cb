"""The compiled step: the same function, the same bits, one compile, and donation that gives up exactly one state."""

import enum
import math
import pathlib
import threading
import warnings

import pytest
import torch

import purestep as ps
from purestep.state.tree import leaves_with_paths

from toys import classifier_loss, differing, mlp, mlp_step, rows_of, snapshot, toy_loss, toy_state, toy_step, ulps

CPU = ps.devices.cpu()


def run(run_step, state, batches):
    for batch in batches:
        state, metrics = run_step(state, batch)
    return state, metrics


@pytest.mark.parametrize("split", [None, 2, 6])
@pytest.mark.parametrize("order", ["tree", "fold"])
@pytest.mark.parametrize("buffers", ["mean", "sequential"])
def test_traced_equals_eager_bitwise(split, order, buffers):
    """Six microbatches are a loop in the graph, with a smaller last one outside of it."""
    model = mlp(dropout=0.3, norm=True)
    step = mlp_step(model, split=split, order=order, buffers=buffers)
    state, batches = ps.init(model, step), [rows_of(23, seed=i) for i in range(2)]
    eager = run(step, state, batches)
    for donate in (False, True):
        traced = ps.jit(step, device=CPU, backend="aot_eager", donate=donate)
        assert differing(eager, run(traced, ps.copy_state(state), batches)) == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_donating_gives_the_same_bits(backend):
    model = mlp(dropout=0.3, norm=True)
    step = mlp_step(model, split=2)
    state, batches = ps.init(model, step), [rows_of(10, seed=i) for i in range(3)]
    results = [
        run(ps.jit(step, device=CPU, backend=backend, donate=donate), ps.copy_state(state), batches)
        for donate in (False, True)
    ]
    assert differing(*results) == []


@pytest.mark.inductor
def test_inductor_is_deterministic_and_close_to_eager():
    model = mlp(dropout=0.3, norm=True)
    step = mlp_step(model, split=2)
    state, batches = ps.init(model, step), [rows_of(10, seed=i) for i in range(3)]
    results = [run(ps.jit(step, device=CPU), state, batches) for _ in range(2)]
    assert differing(*results) == []
    eager, metrics = step(state, batches[0])
    compiled, compiled_metrics = ps.jit(step, device=CPU)(state, batches[0])
    assert ulps(metrics["loss"], compiled_metrics["loss"]) <= 2
    assert torch.equal(metrics["accuracy"], compiled_metrics["accuracy"])
    for name, buffer in eager.buffers.items():
        torch.testing.assert_close(compiled.buffers[name], buffer, rtol=1e-5, atol=1e-7)


@pytest.mark.inductor
def test_a_loop_over_microbatches_compiles_to_the_same_numbers():
    model = mlp(dropout=0.2)
    step = mlp_step(model, split=6)
    state, batch = ps.init(model, step), rows_of(12)
    eager, metrics = step(state, batch)
    fast, fast_metrics = ps.jit(step, device=CPU, donate=True)(ps.copy_state(state), batch)
    assert ulps(metrics["loss"], fast_metrics["loss"]) <= 4
    torch.testing.assert_close(fast.opt_state.mu, eager.opt_state.mu, rtol=1e-5, atol=1e-7)


def test_one_compile_over_a_whole_schedule_and_one_more_for_another_batch_size():
    """Case 68."""
    model = mlp(dropout=0.1)
    tx = ps.adamw(ps.warmup_cosine(peak=1e-2, warmup=10, total=60), b1=ps.linear(0.8, 0.9, 50))
    step = mlp_step(model, split=2, optimizer=tx)
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    state, rates = ps.init(model, step), set()
    for i in range(50):
        state, metrics = fast(state, rows_of(8, seed=i))
        rates.add(float(metrics["lr"]))
    assert fast.compiles == 1
    assert len(rates) > 40  # the rate did move
    state = ps.copy_state(state.replace(counters=state.counters))  # a record built anew, as after a resume
    state, _ = fast(state, rows_of(8))
    assert fast.compiles == 1
    state, _ = fast(state, rows_of(6))
    assert fast.compiles == 2
    fast(state, rows_of(8))
    assert fast.compiles == 2


def test_settings_around_the_step_are_part_of_the_key():
    step = toy_step()
    fast = ps.jit(step, device=CPU, backend="aot_eager")
    state, x = toy_state(step), torch.ones(4, dtype=torch.float64)
    fast(state, x)
    torch.set_num_threads(2)
    fast(state, x)
    assert fast.compiles == 2
    fast(state, torch.ones(8, dtype=torch.float64)[::2])
    assert fast.compiles == 3  # other strides


def test_a_number_in_the_batch_that_changes_is_said_to_compile_again():
    def loss(w, batch, key):
        return ps.Loss((w * batch["x"]).sum() * batch["scale"], weight=len(batch["x"]))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    fast = ps.jit(step, device=CPU, backend="aot_eager")
    state, x = toy_state(step), torch.ones(4, dtype=torch.float64)
    fast(state, {"x": x, "scale": 1.0})
    with pytest.warns(RuntimeWarning, match=r"batch\['scale'\] is a Python value that changed from 1.0 to 2.0"):
        new, _ = fast(state, {"x": x, "scale": 2.0})
    assert float(new.params) == -2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(state, {"x": x, "scale": 1.0})


class Colour(enum.Enum):
    RED = 1.0
    BLUE = -1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, True), (1, 1.0), (Colour.RED, Colour.BLUE), ("a", "b"), (torch.float32, torch.int8)],
)
def test_plain_values_of_a_batch_are_told_apart(one, other):
    def loss(w, batch, key):
        known = {float: math.copysign(2.0, batch["how"]) if isinstance(batch["how"], float) else 0.0}
        factor = known.get(type(batch["how"]), 3.0 if repr(batch["how"]) == repr(one) else 5.0)
        return ps.Loss((w * batch["x"]).sum() * factor, weight=len(batch["x"]))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    fast, state, x = ps.jit(step, device=CPU, backend="aot_eager"), toy_state(step), torch.ones(4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for how in (one, other, one, math.nan, math.nan):
            batch = {"x": x, "how": how}
            assert differing(step(state, batch)[0], fast(state, batch)[0]) == []
    assert fast.compiles == 3


@pytest.mark.parametrize("leaf", [object(), {1}, lambda: 0, range(3), pathlib.Path(".")])
def test_an_object_in_a_batch_cannot_be_told_apart_and_is_refused(leaf):
    step = ps.compose(lambda batch: batch["x"], *toy_step().concerns)
    state, batch = toy_state(step), {"x": torch.ones(4, dtype=torch.float64), "what": leaf}
    with pytest.raises(ps.BatchError, match=type(leaf).__name__):
        ps.jit(step, device=CPU, backend="aot_eager")(state, batch)
    assert float(step(state, batch)[0].params) == -1.0  # eagerly it is handed on


def test_a_donated_state_raises_and_its_tensors_hold_the_new_one():
    model = mlp()
    step = mlp_step(model)
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    state = ps.init(model, step)
    held = dict(state.params)
    new, _ = fast(state, rows_of(4))
    for read in (
        lambda: state.params,
        lambda: state.counters,
        lambda: ps.state_dict(state),
        lambda: fast(state, rows_of(4)),
    ):
        with pytest.raises(ps.DonatedError, match="was donated"):
            read()
    assert "donated" in repr(state)
    assert all(new.params[name] is held[name] for name in held)


def test_a_copy_survives_donation():
    model = mlp()
    step = mlp_step(model)
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    state = ps.init(model, step)
    kept, before = ps.copy_state(state), snapshot(state)
    fast(state, rows_of(4))
    assert differing(before, snapshot(kept)) == []


def test_leaves_over_the_same_memory_are_refused_by_path_and_neighbours_in_one_storage_are_not():
    step = ps.compose(
        ps.forward(lambda p, x, key: ps.Loss((p["a"] * p["b"] * x).sum(), len(x))),
        ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)),
    )  # fmt: skip
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    state = ps.init({"a": torch.ones(2), "b": torch.ones(2)}, step)
    whole = torch.ones(4)
    bad = state.replace(params={"a": whole[:2], "b": whole[1:3]})
    with pytest.raises(ps.StateError, match=r"params\['a'\].*params\['b'\].*share memory"):
        fast(bad, torch.ones(2))
    beside = state.replace(params={"a": whole[:2], "b": whole[2:]})
    one, _ = fast(ps.copy_state(state), torch.ones(2))
    other, _ = fast(beside, torch.ones(2))
    assert differing(one, other) == []


def test_a_step_that_swaps_leaves_or_reports_one_may_be_donated():
    """Outputs that lie in an input's storage are copied before the old leaves are written."""

    def swap(state):
        return state.replace(params={"a": state.params["b"], "b": state.params["a"]})

    step = ps.compose(
        ps.forward(lambda p, x, key: ps.Loss((p["a"] * x + 2 * p["b"] * x).sum(), len(x))), ps.backward(),
        ps.accumulate(), ps.step(ps.sgd(0.0)), ps.concern(lambda s: (s, {"a": s.params["a"]}), has_aux=True), swap,
    )  # fmt: skip
    state = ps.init({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, step)
    for backend in ("eager", "aot_eager"):
        fast = ps.jit(step, device=CPU, backend=backend, donate=True)
        first, metrics = fast(ps.copy_state(state), torch.ones(2))
        second, _ = fast(first, torch.ones(2))
        assert float(metrics["a"]) == 1.0
        assert (float(second.params["a"]), float(second.params["b"])) == (1.0, 2.0)


def test_two_calls_at_once_of_a_donated_step_are_refused():
    entered, leave, failures = threading.Event(), threading.Event(), []

    def loss(w, x, key):
        entered.set()
        leave.wait(10)
        return toy_loss(w, x, key)

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    fast = ps.jit(step, device=CPU, backend="eager", donate=True)
    first, second = toy_state(step), toy_state(step)
    thread = threading.Thread(target=fast, args=(first, torch.ones(2, dtype=torch.float64)))
    thread.start()
    entered.wait(10)
    with pytest.raises(ps.DonatedError, match="another thread"):
        fast(second, torch.ones(2, dtype=torch.float64))
    leave.set()
    thread.join()
    assert not failures
    assert float(fast(second, torch.ones(2, dtype=torch.float64))[0].params) == -1.0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_failure_inside_a_donated_graph_says_whether_the_state_is_lost(backend):
    step = toy_step()
    fast = ps.jit(step, device=CPU, backend=backend, donate=True)
    x = torch.ones(2, dtype=torch.float64)
    state, _ = fast(toy_state(step), x)

    def broken(*inputs):
        raise MemoryError("out of memory")

    ((key, program),) = fast._programs.items()
    import attrs

    fast._programs[key] = attrs.evolve(program, call=broken)
    if backend == "aot_eager":  # writes at its very end
        with pytest.raises(MemoryError):
            fast(state, x)
        fast._programs[key] = program
        assert bool(fast(state, x)[1]["updated"])
        return
    with pytest.raises(ps.DonatedError, match="was lost.*out of memory"):
        fast(state, x)
    with pytest.raises(ps.DonatedError, match="was lost"):
        state.params  # noqa: B018 (reading it is the test)


def test_a_closed_over_tensor_is_refused_by_name():
    weights, x = torch.tensor([1.0, 2.0, 3.0]), rows_of(4)
    model = mlp()

    def weighted(m, batch, key):
        return ps.Loss(
            torch.nn.functional.cross_entropy(m(batch[0]), batch[1], weights, reduction="sum"), len(batch[1])
        )

    def wrong_module(m, batch, key):
        return ps.Loss(model(batch[0]).sum() + m(batch[0]).sum(), weight=len(batch[1]))

    for loss, name in ((weighted, "weights"), (wrong_module, r"model\.0\.weight")):
        step = ps.compose(ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        state = ps.init(model, step)
        with pytest.raises(ps.TraceError, match=f"closes over {name}"):
            ps.jit(step, device=CPU, backend="aot_eager")(state, x)
        step(state, x)  # the state still works


@pytest.mark.parametrize("read", [lambda t: t.item(), float, bool, int])
def test_reading_a_closed_over_tensor_is_refused(read):
    closed = torch.tensor(2.0)

    def loss(w, x, key):
        return ps.Loss((w * x).sum() * read(closed), weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state, x = toy_state(step), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ps.TraceError, match="value of a tensor that it closes over"):
        ps.jit(step, device=CPU, backend="aot_eager")(state, x)
    step(state, x)
    closed = ps.constant(closed)
    if read is float:
        ps.jit(step, device=CPU, backend="aot_eager")(state, x)


def test_an_operator_that_runs_functions_is_refused_by_name():
    def loss(w, x, key):
        total = torch.cond(x.sum() > 0, lambda t: t.sum(), lambda t: t.mean(), (w * x,))
        return ps.Loss(total, weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    for run in (step, ps.jit(step, device=CPU, backend="aot_eager")):
        with pytest.raises(ps.TraceError, match=r"torch\.cond runs functions of its own"):
            run(toy_state(step), torch.ones(2, dtype=torch.float64))


def test_constants_and_tensors_made_inside_are_fine():
    allowed = ps.constant(torch.tensor([1.0, 2.0, 3.0]))

    def loss(m, batch, key):
        inner = torch.tensor([0.5, 1.5, 2.5]) * allowed
        return ps.Loss(torch.nn.functional.cross_entropy(m(batch[0]), batch[1], inner, reduction="sum"), len(batch[1]))

    model = mlp()
    for split in (None, 6):
        head = () if split is None else (ps.split_batch(split),)
        step = ps.compose(*head, ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        state = ps.init(model, step)
        traced = ps.jit(step, device=CPU, backend="aot_eager")
        assert differing(step(state, rows_of(12)), traced(state, rows_of(12))) == []


def test_a_branch_on_a_value_is_refused_with_its_line():
    def loss(w, x, key):
        if x.sum() > 0:  # the line to be named
            return ps.Loss((w * x).sum(), weight=len(x))
        return ps.Loss((w * x).sum() * 2, weight=len(x))

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state, x = toy_state(step), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ps.TraceError, match=r"test_jit\.py:\d+: if x\.sum\(\) > 0"):
        ps.jit(step, device=CPU, backend="aot_eager")(state, x)
    assert float(step(state, x)[0].params) == -1.0


def test_the_leaves_of_a_returned_state_are_vouched_for_without_being_unpacked():
    step = toy_step()
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    x = torch.ones(2, dtype=torch.float64)
    state, _ = fast(toy_state(step), x)
    state, _ = fast(state, x)
    assert "params" not in vars(state)
    assert float(state.params) == -2.0
    assert [path for path, _ in leaves_with_paths(state, "s")][:1] == ["s.params"]


def test_a_state_from_another_step_is_checked_again():
    model = mlp()
    one, other = mlp_step(model), mlp_step(model, optimizer=ps.sgd(0.1))
    state, _ = ps.jit(one, device=CPU, backend="aot_eager")(ps.init(model, one), rows_of(4))
    with pytest.raises(ps.StateError, match=r"state\.opt_state.*ps\.init"):
        ps.jit(other, device=CPU, backend="aot_eager")(state, rows_of(4))


def test_bad_arguments_of_jit_are_named():
    step = toy_step()
    with pytest.raises(ValueError, match="backend must be one of.*'nvfuser'"):
        ps.jit(step, device=CPU, backend="nvfuser")
    with pytest.raises(TypeError, match="step must come from ps.compose"):
        ps.jit(classifier_loss, device=CPU)
    with pytest.raises(TypeError, match="device must be a device"):
        ps.jit(step, device="cpu")


def test_states_that_share_tensors_with_a_donated_one_are_given_up_too():
    model = mlp()
    step = mlp_step(model)
    fast = ps.jit(step, device=CPU, backend="aot_eager", donate=True)
    state = ps.init(model, step)
    other = state.replace(key=ps.random_key(5))
    new, _ = fast(other, rows_of(4))
    with pytest.raises(ps.DonatedError, match="shares tensors with a state that was donated"):
        state.params  # noqa: B018 (reading it is the test)
    before = step(new, rows_of(4))[0]  # shares the key with it, which no step writes
    fast(before, rows_of(4))
    assert differing(new, new) == []


def test_threads_may_run_one_eager_step_at_once():
    model = mlp(dropout=0.4, norm=True)
    step = mlp_step(model, split=2)
    states = [ps.init(model, step, seed=seed) for seed in range(4)]
    expected = [step(state, rows_of(8)) for state in states]
    found = [None] * 4

    def work(i):
        for _ in range(5):
            found[i] = step(states[i], rows_of(8))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert differing(expected, found) == []
