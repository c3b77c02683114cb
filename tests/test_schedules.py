"""Schedules against plain Python and torch.optim.lr_scheduler, and what a pure function of the count promises."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import purestep as ps
from purestep.state.torch_private import fake_mode, fake_of, trace
from purestep.steps.hyper import evaluate

COUNTS = [*range(25), 49, 50, 51, 99, 100, 101, 10**6, 2**40]
RATES = st.floats(1e-9, 10.0, allow_subnormal=False)
STEPS = st.integers(1, 5000)


def plain_linear(n, a, b, total):
    return b if n >= total else a + (b - a) * n / total


def plain_cosine(n, peak, floor, total):
    return floor if n >= total else floor + 0.5 * (peak - floor) * (1.0 + math.cos(math.pi * n / total))


def plain_warmup(n, peak, warmup, total, floor, start):
    if n < warmup:
        return plain_linear(n, start, peak, warmup)
    return plain_cosine(n - warmup, peak, floor, total - warmup)


def plain_piecewise(n, start, changes):
    return next((changes[b] for b in sorted(changes, reverse=True) if n >= b), start)


CHANGES = {20: 0.01, 10: 0.1, 50: 3.0}
PAIRS = {
    "constant": (ps.constant_schedule(0.3), lambda n: 0.3),
    "linear": (ps.linear(0.2, 0.7, 23), lambda n: plain_linear(n, 0.2, 0.7, 23)),
    "linear in one step": (ps.linear(0.2, 0.7, 1), lambda n: plain_linear(n, 0.2, 0.7, 1)),
    "linear of ints": (ps.linear(1, 0, 4), lambda n: plain_linear(n, 1.0, 0.0, 4)),
    "cosine": (ps.cosine(0.3, 50, 0.01), lambda n: plain_cosine(n, 0.3, 0.01, 50)),
    "warmup": (ps.warmup_cosine(3e-3, 10, 100), lambda n: plain_warmup(n, 3e-3, 10, 100, 0.0, 0.0)),
    "warmup from": (ps.warmup_cosine(0.5, 3, 4, 0.1, 0.2), lambda n: plain_warmup(n, 0.5, 3, 4, 0.1, 0.2)),
    "piecewise": (ps.piecewise(1.0, CHANGES), lambda n: plain_piecewise(n, 1.0, CHANGES)),
    "piecewise of ints": (ps.piecewise(1, {5: 0}), lambda n: plain_piecewise(n, 1.0, {5: 0.0})),
}
every = pytest.mark.parametrize(("schedule", "plain"), PAIRS.values(), ids=PAIRS)
schedules = pytest.mark.parametrize("schedule", [pair[0] for pair in PAIRS.values()], ids=PAIRS)


@every
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_schedule_equals_its_restatement_as_0d_float64(schedule, plain, dtype):
    for n in COUNTS:
        if n < torch.iinfo(dtype).max:
            value = schedule(torch.tensor(n, dtype=dtype))
            assert (value.dtype, value.shape) == (torch.float64, torch.Size([]))
            assert float(value) == pytest.approx(plain(n), rel=1e-14, abs=1e-16)


@every
def test_evaluate_takes_the_count_as_an_int(schedule, plain):
    for n in COUNTS:
        value = evaluate(schedule, n)
        assert torch.equal(value, schedule(torch.tensor(n)))
        assert float(value) == pytest.approx(plain(n), rel=1e-14, abs=1e-16)


@given(RATES, RATES, STEPS, st.integers(0, 10_000))
def test_linear_and_cosine_equal_their_restatements_anywhere(a, b, total, n):
    count = torch.tensor(n)
    assert float(ps.linear(a, b, total)(count)) == pytest.approx(plain_linear(n, a, b, total), rel=1e-12, abs=1e-14)
    assert float(ps.cosine(a, total, b)(count)) == pytest.approx(plain_cosine(n, a, b, total), rel=1e-12, abs=1e-14)


@given(RATES, RATES, RATES, STEPS, STEPS, st.integers(0, 10_000))
def test_warmup_cosine_equals_its_restatement_anywhere(peak, floor, start, warmup, more, n):
    value = float(ps.warmup_cosine(peak, warmup, warmup + more, floor, start)(torch.tensor(n)))
    assert value == pytest.approx(plain_warmup(n, peak, warmup, warmup + more, floor, start), rel=1e-12, abs=1e-14)


@given(RATES, st.dictionaries(st.integers(1, 60), RATES, max_size=6))
def test_piecewise_is_exact_at_every_count(start, changes):
    schedule = ps.piecewise(start, changes)
    assert [float(schedule(torch.tensor(n))) for n in range(62)] == [
        plain_piecewise(n, start, changes) for n in range(62)
    ]


@given(RATES, RATES, STEPS)
def test_linear_has_its_ends_exactly(a, b, total):
    schedule = ps.linear(a, b, total)
    assert [float(schedule(torch.tensor(n))) for n in (0, total, total + 1, 10**9)] == [a, b, b, b]


@given(RATES, RATES, STEPS)
def test_cosine_has_its_ends_exactly(a, b, total):
    schedule = ps.cosine(a, total, b)
    assert [float(schedule(torch.tensor(n))) for n in (0, total, total + 1, 10**9)] == [a, b, b, b]


@given(RATES, RATES, RATES, STEPS, STEPS)
def test_warmup_cosine_has_its_corners_exactly(peak, floor, start, warmup, more):
    schedule = ps.warmup_cosine(peak, warmup, warmup + more, floor, start)
    corners = [0, warmup, warmup + more, 10**9]
    assert [float(schedule(torch.tensor(n))) for n in corners] == [start, peak, floor, floor]


def torch_rates(make, steps, lr=0.4):
    param = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([param], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


KIN = torch.optim.lr_scheduler
TORCH_PAIRS = {
    "LinearLR": (ps.linear(0.1, 0.4, 8), lambda o: KIN.LinearLR(o, 0.25, 1.0, 8), 20),
    "LinearLR down": (ps.linear(0.4, 0.04, 5), lambda o: KIN.LinearLR(o, 1.0, 0.1, 5), 20),
    "CosineAnnealingLR": (ps.cosine(0.4, 20, 0.02), lambda o: KIN.CosineAnnealingLR(o, 20, 0.02), 21),
    "MultiStepLR": (ps.piecewise(0.4, {3: 0.2, 9: 0.1}), lambda o: KIN.MultiStepLR(o, [3, 9], 0.5), 20),
    "ConstantLR": (ps.piecewise(0.2, {4: 0.4}), lambda o: KIN.ConstantLR(o, 0.5, 4), 10),
    "LambdaLR": (ps.constant_schedule(0.4), lambda o: KIN.LambdaLR(o, lambda n: 1.0), 10),
}


@pytest.mark.parametrize(("schedule", "make", "steps"), TORCH_PAIRS.values(), ids=TORCH_PAIRS)
def test_a_schedule_equals_its_kin_in_torch(schedule, make, steps):
    found = [float(schedule(torch.tensor(n))) for n in range(steps)]
    assert found == pytest.approx(torch_rates(make, steps), rel=1e-12)


@schedules
def test_the_value_depends_on_the_count_alone(schedule):
    first = {n: float(schedule(torch.tensor(n))) for n in COUNTS}
    assert {n: float(schedule(torch.tensor(n))) for n in reversed(COUNTS)} == {n: first[n] for n in reversed(COUNTS)}
    count = torch.tensor(7)
    schedule(count)
    assert int(count) == 7


@schedules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_does_not_matter(schedule, dtype):
    usual, before = [schedule(torch.tensor(n)) for n in COUNTS], torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        other = [schedule(torch.tensor(n)) for n in COUNTS]
    finally:
        torch.set_default_dtype(before)
    assert {value.dtype for value in other} == {torch.float64}
    assert torch.equal(torch.stack(other), torch.stack(usual))


@schedules
def test_one_trace_serves_every_count(schedule):
    mode = fake_mode()
    graph = trace(lambda count: [schedule(count)], mode, [fake_of(mode, torch.tensor(0))])
    for n in COUNTS:
        assert torch.equal(graph(torch.tensor(n))[0], schedule(torch.tensor(n)))


@pytest.mark.parametrize("make", [ps.sgd, ps.adam, ps.adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_17_a_tensor_rate_is_bit_identical_after_a_hundred_updates(make, dtype):
    rate, factor = torch.tensor(0.1, dtype=dtype), ps.piecewise(0.5, {50: 1.0})
    tx = make(lambda count: rate * factor(count))
    param, state = torch.ones(()), tx.init(torch.ones(()))
    seen = []
    for _ in range(100):
        seen.append(float(tx.hyperparams(state)["lr"]))
        _, state = tx.update(torch.ones(()), state, param)
    assert torch.equal(rate, torch.tensor(0.1, dtype=dtype))
    assert seen == pytest.approx([0.05] * 50 + [0.1] * 50, rel=1e-6)


def test_the_schedule_concern_gives_each_value_at_the_count():
    given_as = {"lr": ps.linear(1.0, 0.0, 4), "weight_decay": 0.25, "b1": torch.tensor(0.5)}
    for n in range(6):
        values = ps.schedule(**given_as)(torch.tensor(n))
        assert {name: float(value) for name, value in values.items()} == {
            "lr": plain_linear(n, 1.0, 0.0, 4),
            "weight_decay": 0.25,
            "b1": 0.5,
        }
        assert {(value.dtype, value.dim()) for value in values.values()} == {(torch.float64, 0)}


BAD = {
    "constant": (lambda: ps.constant_schedule(math.nan), "value"),
    "linear start": (lambda: ps.linear(math.inf, 0.0, 4), "start"),
    "linear end": (lambda: ps.linear(0.0, math.nan, 4), "end"),
    "linear bool": (lambda: ps.linear(True, 0.0, 4), "start"),
    "linear zero": (lambda: ps.linear(1.0, 0.0, 0), "steps"),
    "linear float": (lambda: ps.linear(1.0, 0.0, 4.0), "steps"),
    "linear negative": (lambda: ps.linear(1.0, 0.0, -4), "steps"),
    "cosine peak": (lambda: ps.cosine(math.nan, 4), "peak"),
    "cosine floor": (lambda: ps.cosine(1.0, 4, -math.inf), "floor"),
    "cosine zero": (lambda: ps.cosine(1.0, 0), "total"),
    "warmup zero": (lambda: ps.warmup_cosine(1.0, 0, 10), "warmup"),
    "warmup equal": (lambda: ps.warmup_cosine(1.0, 10, 10), "total=10 and warmup=10"),
    "warmup less": (lambda: ps.warmup_cosine(1.0, 10, 9), "total=9 and warmup=10"),
    "warmup start": (lambda: ps.warmup_cosine(1.0, 1, 9, start=math.nan), "start"),
    "piecewise start": (lambda: ps.piecewise(math.nan, {1: 1.0}), "start"),
    "piecewise value": (lambda: ps.piecewise(1.0, {7: math.inf}), "7"),
    "piecewise zero": (lambda: ps.piecewise(1.0, {0: 1.0}), "boundary 0"),
    "piecewise float": (lambda: ps.piecewise(1.0, {2.5: 1.0}), "boundary 2.5"),
    "schedule none": (lambda: ps.schedule(), "at least one"),
    "schedule nan": (lambda: ps.schedule(lr=math.nan), "lr"),
    "schedule text": (lambda: ps.schedule(lr="0.1"), "lr"),
}


@pytest.mark.parametrize(("make", "words"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_by_name(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


UNFIT = {
    "unknown": (ps.sgd(0.1), {"b1": 0.5}, "no hyperparameter b1; it has lr, weight_decay"),
    "b1 at one": (ps.adam(), {"b1": 1.0}, r"b1 must be finite and in \[0.0, 1.0\), got 1.0"),
    "b2 above one": (ps.adamw(), {"b2": torch.tensor(1.5)}, "b2 must be finite"),
    "negative decay": (ps.sgd(0.1), {"weight_decay": -1.0}, "weight_decay must be finite"),
    "unknown to all parts": (ps.chain(ps.sgd(0.1), ps.sgd(1.0)), {"eps": 0.1}, "no hyperparameter eps"),
}


def composed(tx, **hyper):
    return ps.compose(
        ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), weight=len(x))),
        ps.backward(), ps.accumulate(), ps.schedule(**hyper), ps.step(tx),
    )  # fmt: skip


@pytest.mark.parametrize(("tx", "hyper", "words"), UNFIT.values(), ids=UNFIT)
def test_a_schedule_that_does_not_fit_the_optimizer_is_refused_when_composed(tx, hyper, words):
    with pytest.raises(ps.ComposeError, match=words):
        composed(tx, **hyper)


def test_a_schedule_may_set_what_the_optimizer_may_be_built_with():
    x = torch.ones(2, dtype=torch.float64)
    for tx, hyper, moved in (
        (ps.sgd(1.0), {"lr": -0.5}, 0.5),
        (ps.chain(ps.sgd(0.5), ps.sgd(-1.0, weight_decay=0.1)), {"lr": 2.0}, 4.0),
        (ps.chain(ps.adam(0.5), ps.sgd(-1.0)), {"b1": 0.5, "lr": -1.0}, 1.0),
    ):
        step = composed(tx, **hyper)
        new, _ = step(ps.init(torch.zeros((), dtype=torch.float64), step), x)
        assert float(new.params) == pytest.approx(moved, rel=1e-6)


@pytest.mark.parametrize("name", ["b1", "b2", "weight_decay"])
def test_a_schedule_that_leaves_the_range_stops_there(name):
    step = composed(ps.adam(0.1), **{name: ps.piecewise(0.5, {1: 1.0 if name != "weight_decay" else -1.0})})
    state, x = ps.init(torch.zeros((), dtype=torch.float64), step), torch.ones(2, dtype=torch.float64)
    state, _ = step(state, x)
    with pytest.raises(ps.NumericsError, match="out of its range"):
        step(state, x)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (lambda n: "0.1", TypeError, "0.1"),
        (lambda n: None, TypeError, "None"),
        (lambda n: torch.ones(2), ValueError, "0-d"),
    ],
)
def test_a_function_that_gives_no_number_is_refused_when_evaluated(value, error, words):
    with pytest.raises(error, match=words):
        evaluate(value, 0)
