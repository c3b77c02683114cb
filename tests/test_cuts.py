"""However the same data is cut or spread, the same update comes out."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import purestep as ps
from purestep.steps.accumulate import add_sums

from strategies import cuts
from toys import classifier_loss, differing, mlp, mlp_step, rows_of, toy_state, toy_step


def masked_rows(masked=(0, 1, 2)):
    x, y = rows_of(8, torch.float64)
    y[list(masked)] = -100
    return x, y


def folded(gradient, forward, params, parts):
    fold = ps.accumulate()
    return fold, fold([gradient(forward, params, part) for part in parts])


def cut(batch, sizes):
    return list(zip(*(leaf.split(sizes) for leaf in batch), strict=True))


@given(cuts(8))
def test_gradient_is_that_of_the_undivided_batch_for_every_cut(sizes):
    """Case 1: three targets of the first rows are masked."""
    model, batch = mlp(dtype=torch.float64), masked_rows()
    forward, gradient = ps.forward(classifier_loss, model), ps.backward()
    params = {name: p.detach() for name, p in model.named_parameters()}
    fold, sums = folded(gradient, forward, params, cut(batch, sizes))
    logits = model(batch[0])
    torch.nn.functional.cross_entropy(logits, batch[1]).backward()  # torch's mean over the valid targets
    grads = fold.divide(sums)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-12, atol=1e-15)
    assert int(sums.weight) == 5


@pytest.mark.parametrize("split", [None, 1, 2, 3, 6])
def test_loss_gradient_norm_and_weight_do_not_depend_on_the_number_of_microbatches(split):
    """Case 2: a constant loss of 1 besides, gradients of 1."""

    def loss(w, x, key):
        return ps.Loss((w * x).sum() + len(x) * 1.0, weight=len(x))

    head = () if split is None else (ps.split_batch(split),)
    step = ps.compose(*head, ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state, metrics = step(toy_state(step), torch.ones(6, dtype=torch.float64))
    assert (float(metrics["loss"]), float(metrics["grad_norm"]), float(state.params)) == (1.0, 1.0, -1.0)


def test_microbatch_without_a_valid_target_adds_nothing():
    """Case 4: all labels of the first half are ignored."""
    model, batch = mlp(dtype=torch.float64), masked_rows(range(4))
    step = mlp_step(model, split=2, clip=False, optimizer=ps.sgd(0.1))
    half = mlp_step(model, clip=False, optimizer=ps.sgd(0.1))
    state = ps.init(model, step)
    whole, metrics = step(state, batch)
    second, _ = half(state, tuple(leaf[4:] for leaf in batch))
    assert bool(metrics["updated"])
    for name in whole.params:
        torch.testing.assert_close(whole.params[name], second.params[name], rtol=1e-12, atol=1e-14)


def test_empty_window_changes_only_the_counters():
    """Case 4: the whole window is empty."""
    model = mlp(norm=True)
    step = mlp_step(model, split=2)
    state, _ = step(ps.init(model, step), rows_of(8))
    x, y = rows_of(8)
    after, metrics = step(state, (x, torch.full_like(y, -100)))
    assert not bool(metrics["updated"])
    assert differing(state, after) == [f"tree.counters.{name}" for name in ("batches", "samples", "skips")]
    assert int(after.counters.skips) == 1
    assert int(after.opt_state.count) == int(after.counters.updates) == 1


def test_metrics_are_weighted_by_rows_and_not_means_of_means():
    """Case 5: 0.7 on 256 rows, 0.8 on 256, 0.9 on 10."""
    values = torch.tensor([0.7] * 256 + [0.8] * 256 + [0.9] * 10, dtype=torch.float64)

    def loss(w, x, key):
        return ps.Loss((w * x).sum(), len(x), metrics={"value": ps.Sum(x.sum(), len(x))})

    step = ps.compose(ps.split_batch(size=256), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    _, metrics = step(toy_state(step), values)
    assert float(metrics["value"]) == pytest.approx(0.752874, abs=1e-6)


def test_gradient_of_uneven_microbatches_is_the_mean_over_samples():
    """Case 5: x = [1, 1, 1, 1] and [4]: 1.6 and not 2.5."""
    step = toy_step(split=None)
    forward, gradient, params = (
        ps.forward(lambda w, x, key: ps.Loss((w * x).sum(), len(x))),
        ps.backward(),
        torch.zeros(()),
    )
    fold, sums = folded(gradient, forward, params, [torch.ones(4), torch.tensor([4.0])])
    assert float(fold.divide(sums)) == pytest.approx(1.6)
    state, _ = step(toy_state(step), torch.tensor([1.0, 1, 1, 1, 4], dtype=torch.float64))
    assert float(state.params) == pytest.approx(-1.6)


def test_the_optimizer_runs_once_per_window():
    """Case 6: (w - 1)^2 from 0 with SGD 0.1 and two equal microbatches gives 0.2."""

    def loss(w, x, key):
        return ps.Loss(((w - 1) ** 2).expand(len(x)).sum(), weight=len(x))

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    state, _ = step(toy_state(step), torch.zeros(2))
    assert float(state.params) == pytest.approx(0.2)
    assert int(state.opt_state.count) == 1


def spread(model, step_of, state, batch, world, total=8):
    """The update of ``world`` processes that share the microbatches, simulated in this one."""
    step = step_of(total // world)
    share = len(batch[1]) // world
    local = step.phases[0].local
    parts = [
        local(state, tuple(leaf[rank * share : (rank + 1) * share] for leaf in batch), rank=rank)
        for rank in range(world)
    ]
    while len(parts) > 1:
        parts = [add_sums(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return step.phases[0].apply(state, parts[0])


@pytest.mark.parametrize(("world", "split"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_moving_microbatches_to_ranks_does_not_change_the_step(world, split):
    """Case 7: exact in float64."""
    step = toy_step(split=split)
    batch = (torch.arange(16, dtype=torch.float64), torch.zeros(16))
    state = toy_state(step)
    state, _ = spread(None, lambda k: toy_step_of_pairs(k), state, batch, world)
    assert float(state.params) == -7.5


def toy_step_of_pairs(split):
    def loss(w, batch, key):
        return ps.Loss((w * batch[0]).sum(), weight=len(batch[0]))

    return ps.compose(ps.split_batch(split), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))


@given(seed=st.integers(0, 10), norm=st.booleans(), valid=st.integers(0, 16))
def test_bits_do_not_depend_on_the_spread_with_dropout_and_batch_norm(seed, norm, valid):
    """The promise of ``order="tree"``: 1, 2, 4 and 8 processes, bitwise, also with ragged weights."""
    model, (x, y) = mlp(dropout=0.4, norm=norm), rows_of(16, seed=seed)
    y[valid:] = -100
    state = ps.init(model, mlp_step(model, split=8), seed=seed)
    results = [spread(model, lambda k: mlp_step(model, split=k), state, (x, y), world) for world in (1, 2, 4, 8)]
    for other in results[1:]:
        assert differing(results[0], other) == []


def test_dropout_of_the_spread_draws_per_global_microbatch():
    """A planted fault: without the global index the ranks would draw the same masks."""
    model, batch = mlp(dropout=0.5), rows_of(16)
    step = mlp_step(model, split=4)
    state = ps.init(model, step)
    half = tuple(leaf[:8] for leaf in batch)
    one, other = (step.phases[0].local(state, half, rank=rank) for rank in (0, 1))
    assert differing(one.grads, other.grads)


@given(orders_seed=st.integers(0, 20), parts=st.integers(1, 9))
def test_both_orders_add_the_same_numbers(orders_seed, parts):
    torch.manual_seed(orders_seed)
    values = torch.randn(parts, dtype=torch.float64)
    forward, gradient = ps.forward(lambda w, x, key: ps.Loss(w * x, weight=1)), ps.backward()
    sums = [gradient(forward, torch.zeros((), dtype=torch.float64), x) for x in values]
    for order in ("tree", "fold"):
        torch.testing.assert_close(ps.accumulate(order)(sums).grads, values.sum(), rtol=1e-13, atol=1e-14)


def test_tree_order_adds_neighbours_first_and_fold_adds_from_the_left():
    """In float32 the order shows: 1e8 + 1 - 1e8 - 1 is 0 in pairs from the left only if neighbours meet first."""
    forward, gradient = ps.forward(lambda w, x, key: ps.Loss(w * x, weight=1)), ps.backward()
    values = [torch.tensor(v) for v in (1e8, 1.0, -1e8, 1.0)]
    sums = [gradient(forward, torch.zeros(()), x) for x in values]
    pair = lambda a, b: float(torch.tensor(a) + torch.tensor(b))  # noqa: E731 (one line of arithmetic)
    assert float(ps.accumulate("tree")(sums).grads) == pair(pair(1e8, 1.0), pair(-1e8, 1.0))
    assert float(ps.accumulate("fold")(sums).grads) == pair(pair(pair(1e8, 1.0), -1e8), 1.0)


def test_a_leaf_used_by_one_microbatch_only_keeps_its_gradient():
    def loss(params, x, key):
        used = params["a"] if bool(x[0] > 0) else params["b"]
        return ps.Loss((used * x).sum(), weight=len(x))

    forward, gradient, fold = ps.forward(loss), ps.backward(), ps.accumulate()
    params = {"a": torch.zeros(()), "b": torch.zeros(()), "c": torch.zeros(())}
    sums = fold([gradient(forward, params, torch.tensor([v])) for v in (2.0, -4.0)])
    grads = fold.divide(sums)
    assert (float(grads["a"]), float(grads["b"]), grads["c"]) == (1.0, -2.0, None)
