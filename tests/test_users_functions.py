"""Functions of the user's own between concerns: what they see, what becomes of what they return, what they draw."""

import math

import pytest
import torch

import purestep as ps

from toys import differing, mlp, same_bits, toy_loss

CPU = ps.devices.cpu()
RUNS = ["none", "eager", "aot_eager"]
X = torch.tensor([1.0, 3.0], dtype=torch.float64)


def runner(step, backend):
    return step if backend == "none" else ps.jit(step, device=CPU, backend=backend)


def toy(*after, middle=(), loss=toy_loss, functions=(), tx=None):
    return ps.compose(
        ps.forward(loss), *functions, ps.backward(), ps.accumulate(), *middle, ps.step(tx or ps.sgd(1.0)), *after
    )


def start(step, window=20):
    return ps.init(torch.zeros((), dtype=torch.float64), step, window=window)


@pytest.mark.parametrize("backend", RUNS)
def test_a_function_after_step_sees_the_whole_new_state(backend):
    def peek(state, slot):
        clocks = state.counters
        return state, torch.stack([state.params, clocks.updates, clocks.samples, clocks.batches, state.window.last()])

    step = toy(ps.concern(peek, slot="peek", init=lambda params: torch.zeros(5, dtype=torch.float64)))
    state, _ = runner(step, backend)(start(step), X)
    assert state.slots["peek"].tolist() == [-2.0, 1.0, 2.0, 1.0, 0.0]
    state, _ = runner(step, backend)(state, X)
    assert state.slots["peek"].tolist() == [-4.0, 2.0, 4.0, 2.0, -4.0]


CHANGES = {
    "params": lambda s: s.replace(params=s.params * 0 + 7.0),
    "opt_state": lambda s: s.replace(opt_state=ps.map_leaves(lambda leaf: leaf * 0 + 7, s.opt_state)),
    "counters": lambda s: s.replace(
        counters=ps.Counters(
            s.counters.updates, s.counters.batches, s.counters.samples, s.counters.skips, s.counters.epochs + 7
        )
    ),
    "window": lambda s: s.replace(window=s.window.reset()),
    "key": lambda s: s.replace(key=ps.fold_in(s.key, 7)),
}


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("field", CHANGES)
def test_what_a_function_after_step_returns_is_the_new_state(backend, field):
    plain, changed = toy(), toy(CHANGES[field])
    expected = CHANGES[field](runner(plain, backend)(start(plain), X)[0])
    assert differing(expected, runner(changed, backend)(start(changed), X)[0]) == []


@pytest.mark.parametrize("backend", RUNS)
def test_what_a_function_after_step_changes_is_undone_by_a_skip(backend):
    bad = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    step = toy(*CHANGES.values(), middle=(ps.clip(max_norm=1.0),))
    before = start(step)
    after, metrics = runner(step, backend)(before, bad)
    assert not bool(metrics["updated"])
    for field in ("params", "opt_state", "window"):
        assert differing(getattr(before, field), getattr(after, field)) == []
    assert (int(after.counters.skips), int(after.counters.updates)) == (1, 0)


@pytest.mark.parametrize("backend", RUNS)
def test_slots_of_others_can_be_renewed_after_step(backend):
    def count(state, slot):
        return state, slot + 1

    def reset(state):
        return state.replace(slots={**state.slots, "count": state.slots["count"] * 0 + 10})

    own = ps.concern(count, slot="count", init=lambda params: torch.zeros((), dtype=torch.int64))
    for order, expected in (((own, reset), 10), ((reset, own), 11)):
        step = toy(*order)
        state, _ = runner(step, backend)(start(step), X)
        assert int(state.slots["count"]) == expected


@pytest.mark.parametrize("backend", RUNS)
def test_a_function_on_the_loss_draws_its_own_numbers(backend):
    drawn = {}

    def loss(w, x, key):
        noise = ps.uniform(key, (3,), dtype=torch.float64)
        return ps.Loss((w * x).sum(), weight=len(x), metrics={"loss_noise": ps.Sum(noise, 1)})

    def jitter(loss, key):
        own, plain = ps.uniform(key, (3,), dtype=torch.float64), torch.rand(3, dtype=torch.float64)
        more = {"own": ps.Sum(own, 1), "plain": ps.Sum(plain, 1)}
        return loss.replace(metrics={**loss.metrics, **more})

    step = toy(loss=loss, functions=(jitter,))
    _, metrics = runner(step, backend)(start(step), X)
    drawn = {name: tuple(metrics[name].tolist()) for name in ("loss_noise", "own", "plain")}
    assert len(set(drawn.values())) == 3


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32])
def test_integer_metrics_do_not_overflow_their_dtype(backend, dtype):
    def loss(w, x, key):
        most = torch.iinfo(dtype).max if dtype != torch.bool else 1
        return ps.Loss((w * x).sum(), len(x), metrics={"n": ps.Sum(torch.full((), most, dtype=dtype), 1)})

    step = ps.compose(ps.split_batch(4), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    _, metrics = runner(step, backend)(start(step), X.repeat(2))
    expected = 1.0 if dtype == torch.bool else float(torch.tensor(torch.iinfo(dtype).max, dtype=torch.float32))
    assert float(metrics["n"]) == expected


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize(
    "weights", [[-1.0, 3.0], [math.inf, 1.0], [math.nan, 1.0], [1e-46, 0.0], [1e-46, 1e-46], [1e39, 1.0]]
)
def test_a_weight_that_cannot_be_divided_by_is_refused_in_any_microbatch(backend, weights):
    def loss(w, batch, key):
        return ps.Loss((w * batch[0]).sum(), weight=batch[1].sum())

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = start(step)
    with pytest.raises(ps.NumericsError, match="a weight is negative, not finite or too small"):
        runner(step, backend)(state, (X, torch.tensor(weights, dtype=torch.float64)))
    assert float(runner(step, backend)(state, (X, torch.ones(2)))[0].params) == -2.0


@pytest.mark.parametrize("backend", RUNS)
def test_metrics_that_differ_between_microbatches_are_named(backend):
    def loss(w, x, key):
        extra = {"first": ps.Sum(x.sum(), 1)} if len(x) == 2 else {"last": ps.Sum(x.sum(), 1)}
        return ps.Loss((w * x).sum(), len(x), metrics=extra)

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    with pytest.raises(ps.LossError, match="first, last"):
        runner(step, backend)(start(step), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "weight", "updated", "fault"])
@pytest.mark.parametrize("place", ["middle", "after"])
def test_the_steps_own_metrics_are_not_replaced(name, place):
    own = ps.concern(lambda value: (value, {name: torch.zeros(())}), has_aux=True)
    step = toy(own) if place == "after" else toy(middle=(ps.clip(max_norm=1.0), own))
    with pytest.raises(ps.ComposeError, match=f"the metric '{name}' is reported by the step itself"):
        step(start(step), X)


@pytest.mark.parametrize("backend", RUNS)
def test_metrics_may_have_a_shape(backend):
    def loss(w, x, key):
        return ps.Loss((w * x).sum(), len(x), metrics={"per": ps.Sum(torch.stack([x.sum(), -x.sum()]), len(x))})

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    _, metrics = runner(step, backend)(start(step), X)
    assert metrics["per"].tolist() == [2.0, -2.0]


@pytest.mark.parametrize("split", [1, 2, 6])
@pytest.mark.parametrize("order", ["tree", "fold"])
def test_strides_of_params_are_kept_whatever_a_function_returns(split, order):
    """More than four microbatches go through a loop, whose carry keeps its strides."""
    w = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).T.contiguous().T  # not contiguous

    def loss(p, x, key):
        return ps.Loss((x @ p).square().sum(), weight=len(x))

    def flip(grads):
        return grads.T.contiguous().T if grads.is_contiguous() else grads.contiguous()

    for functions in ((), (flip,)):
        step = ps.compose(
            ps.split_batch(split), ps.forward(loss), ps.backward(), ps.accumulate(order), *functions,
            ps.step(ps.sgd(0.01, momentum=0.9)),
        )  # fmt: skip
        state = ps.init(w, step)
        assert not state.params.is_contiguous()
        for donate in (False, True):
            fast = ps.jit(step, device=CPU, backend="aot_eager", donate=donate)
            one, two = ps.copy_state(state), ps.copy_state(state)
            for _ in range(3):
                x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)
                one, two = step(one, x)[0], fast(two, x)[0]
            assert differing(one, two) == []
            assert two.params.stride() == state.params.stride()
            assert fast.compiles == 1


@pytest.mark.parametrize("made_with", [ps.sgd(0.1, momentum=0.9), ps.adam(0.1, amsgrad=True), ps.chain(ps.adam(0.1))])
@pytest.mark.parametrize("backend", RUNS)
def test_the_state_of_another_optimizer_is_refused(backend, made_with):
    x = torch.ones(2, dtype=torch.float64)
    wanted, other = toy(tx=ps.adam(0.1)), toy(tx=made_with)
    with pytest.raises(ps.StateError, match=r"made for another optimizer: .*state\.opt_state"):
        runner(wanted, backend)(start(other), x)
    runner(wanted, backend)(start(wanted), x)


@pytest.mark.parametrize("backend", RUNS)
def test_a_tensor_as_hyperparameter_is_copied(backend):
    rate, bound = torch.tensor(0.5), torch.tensor(0.25, dtype=torch.float64)
    step = toy(middle=(ps.schedule(weight_decay=bound),), tx=ps.sgd(rate))
    run, state = runner(step, backend), start(step)
    rate.fill_(100.0)
    bound.fill_(100.0)
    assert float(run(state, X)[0].params) == -1.0


@pytest.mark.parametrize("backend", RUNS)
def test_inference_mode_is_named(backend):
    step = toy()
    run, state = runner(step, backend), start(step)
    with torch.inference_mode():
        with pytest.raises(ps.StateError, match="inference_mode"):
            run(state, X)
        with pytest.raises(ps.StateError, match="made inside"):
            start(step)
        inside, x = ps.copy_state(state), X.clone()
    with pytest.raises(ps.StateError, match=r"state\.\w+.* was made inside torch\.inference_mode"):
        run(inside, X)
    with pytest.raises(ps.BatchError, match="batch was made inside torch"):
        run(state, x)
    assert float(run(ps.copy_state(inside), X)[0].params) == -2.0


def test_a_loss_with_dropout_and_a_function_have_the_same_bits_in_all_forms():
    model = mlp(dropout=0.5)

    def loss(m, batch, key):
        return ps.Loss(m(batch[0]).square().sum(), weight=len(batch[0]))

    def smooth(loss, key):
        return loss.replace(total=loss.total * (1.0 + 0.1 * torch.rand(())))

    step = ps.compose(
        ps.split_batch(2), ps.forward(loss, model), smooth, ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1))
    )
    state, x = ps.init(model, step), (torch.randn(8, 6), torch.zeros(8))
    results = [runner(step, backend)(state, x) for backend in RUNS]
    assert differing(results[0], results[1]) == []
    assert differing(results[0], results[2]) == []
    assert not same_bits(results[0][0].params["0.weight"], state.params["0.weight"])
