"""The contract that every concern enters: pure, alone and composed, traced as eager; add a new one to ``CONCERNS``."""

import copy

import pytest
import torch

import purestep as ps
from purestep.state.torch_private import fake_mode, fake_of, trace
from purestep.state.tree import flatten
from purestep.steps.concern import KINDS, Concern

from toys import classifier_loss, differing, mlp, rows_of, snapshot

MODEL = mlp(dropout=0.3, norm=True)
PARAMS = {name: p.detach() for name, p in MODEL.named_parameters()}
BUFFERS = {name: b.detach() for name, b in MODEL.named_buffers()}
KEY = ps.random_key(3)
FORWARD = ps.forward(classifier_loss, MODEL)
GRADS = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for name, p in PARAMS.items()}
PARTS = [ps.backward()(FORWARD, PARAMS, rows_of(4, seed=i), ps.fold_in(KEY, i), buffers=BUFFERS) for i in range(3)]
ADAMW = ps.step(ps.adamw(0.1))


def ema(state, mean):
    return state, ps.map_leaves(lambda m, p: m + 0.5 * (p - m), mean, state.params)


# Each with a call of it alone: arguments, and how to call it.
CONCERNS = {
    "split_batch": (ps.split_batch(2), (rows_of(5),), lambda c, batch: c(batch)),
    "forward": (FORWARD, (PARAMS, rows_of(4), KEY, BUFFERS), lambda c, p, x, k, b: c(p, x, k, buffers=b).total.detach()),
    "backward": (
        ps.backward(), (PARAMS, rows_of(4), KEY, BUFFERS), lambda c, p, x, k, b: c(FORWARD, p, x, k, buffers=b)
    ),
    "accumulate": (ps.accumulate(), (PARTS,), lambda c, parts: (c(parts), c.divide(c(parts)))),
    "accumulate fold": (ps.accumulate("fold"), (PARTS,), lambda c, parts: (c(parts), c.divide(c(parts)))),
    "clip": (ps.clip(max_norm=0.5), (GRADS,), lambda c, grads: c(grads)),
    "clip by value": (ps.clip(max_value=0.1), (GRADS,), lambda c, grads: c(grads)),
    "schedule": (
        ps.schedule(lr=ps.linear(1.0, 0.0, 9)), (torch.tensor(3),), lambda c, count: c(count)
    ),
    "step": (ADAMW, (GRADS, ADAMW.optimizer.init(PARAMS), PARAMS), lambda c, g, s, p: c(g, s, p)),
    "function": (ps.concern(lambda grads: ps.map_leaves(torch.sign, grads)), (GRADS,), lambda c, grads: c.call(grads, KEY)),
    "keyed function": (
        ps.concern(lambda grads: ps.map_leaves(lambda g: g + torch.randn_like(g), grads)), (GRADS, KEY),
        lambda c, grads, key: c.call(grads, key),
    ),
}  # fmt: skip


@pytest.fixture(params=CONCERNS, ids=lambda name: name.replace(" ", "_"))
def case(request):
    return CONCERNS[request.param]


def test_says_what_it_takes_gives_and_needs(case):
    concern = case[0]
    assert isinstance(concern, Concern)
    if concern.takes:  # a function of one's own learns its place when it is composed
        assert concern.takes in KINDS
        assert KINDS.index(concern.gives) >= KINDS.index(concern.takes)
    assert set(concern.slots(PARAMS)) == set(concern.slot_names)
    assert type(concern).__doc__
    assert type(concern).__call__.__doc__ or type(concern).call.__doc__


def test_alone_on_plain_tensors_it_is_pure_and_repeatable(case):
    concern, arguments, call = case
    before, numbers = snapshot(arguments), torch.random.get_rng_state()
    one = call(concern, *arguments)
    torch.manual_seed(99)
    other = call(concern, *copy.deepcopy(arguments))
    torch.random.set_rng_state(numbers)
    assert differing(before, snapshot(arguments)) == []
    assert differing(snapshot(one), snapshot(other)) == []


def test_the_global_generator_does_not_move(case):
    concern, arguments, call = case
    numbers = torch.random.get_rng_state()
    call(concern, *arguments)
    assert torch.equal(numbers, torch.random.get_rng_state())


def test_traced_it_gives_the_same_bits(case):
    concern, arguments, call = case
    values, treedef = flatten(arguments)
    mode = fake_mode()

    def flat(*inputs):
        return [
            leaf for leaf in flatten(call(concern, *treedef.unflatten(inputs)))[0] if isinstance(leaf, torch.Tensor)
        ]

    graph = trace(flat, mode, [fake_of(mode, leaf) for leaf in values])
    with torch.no_grad():
        assert differing(list(flat(*values)), list(graph(*values))) == []


def test_nothing_it_gives_lies_in_what_it_was_given(case):
    """An output may be an input handed on whole (or a view of the batch), but none of the step's results is written."""
    concern, arguments, call = case
    if isinstance(concern, type(ps.split_batch(2))):
        return  # views of the batch, by its documentation
    given = {leaf.data_ptr() for leaf in flatten(arguments)[0] if isinstance(leaf, torch.Tensor)}
    out = flatten(call(concern, *arguments))[0]
    assert not [leaf for leaf in out if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.data_ptr() in given]


def composed(concern):
    """The concern in a step, in the place of the plain one of its kind, or before ``step``."""
    line = [ps.split_batch(2), FORWARD, ps.backward(), ps.accumulate(), ADAMW]
    for place, plain in enumerate(line):
        if type(plain) is type(concern):
            line[place] = concern
            return ps.compose(*line)
    return ps.compose(*line[:4], concern, ADAMW)


ASKED = [
    "pure", "drawn from the key", "deterministic", "stable in its form", "spread invariant", "resumable",
    "equal eager and compiled (aot_eager)",
]  # fmt: skip


def test_composed_it_holds_every_property(case, purestep_check):
    step = composed(case[0])
    only = [name for name in ASKED if name != "spread invariant" or step.phases[0].accumulate.order == "tree"]
    report = purestep_check(step, ps.init(MODEL, step), rows_of(6), device=ps.devices.cpu(), only=only)
    assert [result.verdict for result in report.results] == ["holds"] * len(only)


def test_a_slot_of_ones_own_is_made_kept_and_gated():
    step = ps.compose(
        ps.forward(classifier_loss, MODEL), ps.backward(), ps.accumulate(), ADAMW,
        ps.concern(ema, slot="ema", init=lambda params: params),
    )  # fmt: skip
    state = ps.init(MODEL, step)
    assert differing(state.slots["ema"], state.params) == []
    new, _ = step(state, rows_of(4))
    expected = ps.map_leaves(lambda m, p: m + 0.5 * (p - m), state.params, new.params)
    assert differing(new.slots["ema"], expected) == []
    x, y = rows_of(4)
    skipped, metrics = step(new, (x, torch.full_like(y, -100)))
    assert not bool(metrics["updated"])
    assert differing(new.slots, skipped.slots) == []


def test_a_function_may_stand_between_any_two_concerns():
    seen = []

    def mark(name):
        def fn(value):
            seen.append((name, type(value).__name__))
            return value

        return fn

    step = ps.compose(
        mark("batch"), ps.split_batch(2), mark("microbatch"), FORWARD, mark("loss"), ps.backward(), mark("sums"),
        ps.accumulate(), mark("grads"), ps.clip(max_norm=1.0), mark("clipped"), ADAMW, mark("state"),
    )  # fmt: skip
    plain = ps.compose(ps.split_batch(2), FORWARD, ps.backward(), ps.accumulate(), ps.clip(max_norm=1.0), ADAMW)
    state = ps.init(MODEL, step)
    marked, _ = step(state, rows_of(6))
    assert seen == [
        ("batch", "tuple"),
        *[("microbatch", "tuple"), ("loss", "Loss"), ("sums", "Sums")] * 2,
        ("grads", "dict"), ("clipped", "dict"), ("state", "TrainState"),
    ]  # fmt: skip
    assert differing(marked, plain(state, rows_of(6))[0]) == []


def test_a_function_before_accumulate_sees_one_microbatch_and_after_it_the_gradients():
    def loss(w, x, key):
        return ps.Loss((w * x).sum(), weight=len(x))

    seen = []
    step = ps.compose(
        ps.split_batch(2), ps.forward(loss), ps.backward(), lambda s: seen.append(float(s.grads)) or s, ps.accumulate(),
        lambda g: seen.append(float(g)) or g * 2, ps.step(ps.sgd(1.0)),
    )  # fmt: skip
    state, _ = step(ps.init(torch.tensor(0.0), step), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert seen == [3.0, 7.0, 2.5]
    assert float(state.params) == -5.0


def test_random_numbers_of_ones_own_function_come_from_the_key():
    def noise(grads):
        return ps.map_leaves(lambda g: g + torch.randn_like(g), grads)

    step = ps.compose(FORWARD, ps.backward(), ps.accumulate(), noise, noise, ps.step(ps.sgd(1.0)))
    state, batch = ps.init(MODEL, step), rows_of(4)
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(step(state, batch)[0])
    assert differing(*results) == []
    quiet = ps.compose(FORWARD, ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    drawn = {n: quiet(state, batch)[0].params[n] - results[0].params[n] for n in PARAMS}
    assert float(drawn["0.weight"].std()) == pytest.approx(2**0.5, rel=0.35)  # two draws that differ, not one doubled


def test_clip_comes_after_the_division_and_before_the_step():
    """Case 32: microbatch gradients 3 and -1 have mean 1, which a limit of 1 lets pass."""
    step = ps.compose(
        ps.split_batch(2), ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), len(x))), ps.backward(), ps.accumulate(),
        ps.clip(max_norm=1.0), ps.step(ps.sgd(1.0)),
    )  # fmt: skip
    state, _ = step(ps.init(torch.tensor(0.0, dtype=torch.float64), step), torch.tensor([3.0, -1.0]).double())
    assert float(state.params) == pytest.approx(-1.0, rel=1e-5)


def test_reported_norm_is_the_one_before_clipping():
    """Case 31: gradient (3, 4), limit 1."""
    step = ps.compose(
        ps.forward(lambda w, x, key: ps.Loss((w * x[0]).sum(), 1)), ps.backward(), ps.accumulate(),
        ps.clip(max_norm=1.0), ps.step(ps.sgd(1.0)),
    )  # fmt: skip
    state, metrics = step(ps.init(torch.zeros(2), step), torch.tensor([[3.0, 4.0]]))
    assert float(metrics["grad_norm"]) == 5.0
    torch.testing.assert_close(state.params, torch.tensor([-0.6, -0.8]), rtol=1e-6, atol=0)


def test_schedule_concern_moves_the_rate_of_the_optimizer():
    step = ps.compose(
        ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), len(x))), ps.backward(), ps.accumulate(),
        ps.schedule(lr=ps.piecewise(1.0, {1: 0.5})), ps.step(ps.sgd(9.0)),
    )  # fmt: skip
    state, rates = ps.init(torch.tensor(0.0), step), []
    for _ in range(2):
        state, metrics = step(state, torch.ones(1))
        rates.append(float(metrics["lr"]))
    assert rates == [1.0, 0.5]
    assert float(state.params) == -1.5
