"""A step changes nothing it is given, in every backend, also when the loss raises."""

import os

import pytest
import torch
from hypothesis import given

import purestep as ps

from strategies import seeds
from toys import classifier_loss, differing, mlp, mlp_step, rows_of, snapshot

BACKENDS = ["none", "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def runner(step, backend, donate=False):
    return step if backend == "none" else ps.jit(step, device=ps.devices.cpu(), backend=backend, donate=donate)


def world(model):
    """Everything around a step that it must not touch."""
    modes = [part.training for part in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    attributes = {name: dict(vars(part)) for name, part in model.named_modules()}
    shared = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))
    numbers = torch.random.get_rng_state()
    return (
        modes, flags, shared, {name: list(table) for name, table in attributes.items()},
        snapshot(dict(model.state_dict())), numbers,
    )  # fmt: skip


def same_world(one, other):
    return one[:4] == other[:4] and not differing(one[4], other[4]) and torch.equal(one[5], other[5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_changes_nothing_it_is_given(backend):
    model, batch = mlp(dropout=0.3, norm=True), rows_of(10)
    step = mlp_step(model, split=2)
    state = ps.init(model, step)
    run = runner(step, backend)
    run(state, batch)  # compiling is over before the world is looked at
    before = (snapshot(state), snapshot(batch), world(model))
    new, _ = run(state, batch)
    assert differing(before[0], snapshot(state)) == []
    assert differing(before[1], snapshot(batch)) == []
    assert same_world(before[2], world(model))
    assert differing(state, new)


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_a_loss_that_raises_leaves_everything_as_it_was(backend):
    model, batch = mlp(dropout=0.3, norm=True), rows_of(10)

    def loss(model, batch, key):
        result = classifier_loss(model, batch, key)
        model.eval()
        model.extra = torch.ones(1)
        if len(batch[1]) != 10:
            raise RuntimeError("from the loss")
        model.train()
        return result

    step = ps.compose(ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    run, state = runner(step, backend, donate=backend != "none"), ps.init(model, step)
    template = step.phases[0].forward.template.module
    before = (snapshot(state), world(model), [part.training for part in template.modules()])
    with pytest.raises(RuntimeError, match="from the loss"):
        run(state, rows_of(9))
    assert differing(before[0], snapshot(state)) == []
    assert same_world(before[1], world(model))
    assert [part.training for part in template.modules()] == before[2]
    assert not hasattr(template, "extra")
    assert all(p.is_meta for p in template.parameters())
    _, metrics = run(state, batch)
    assert bool(metrics["updated"])


def test_later_changes_of_the_module_do_not_reach_the_step():
    model, batch = mlp(dropout=0.3), rows_of(6)
    step = mlp_step(model)
    state = ps.init(model, step)
    expected, _ = step(state, batch)
    model.eval()
    for p in model.parameters():
        p.data.zero_()
    model[0] = torch.nn.Identity()
    again, _ = step(state, batch)
    assert differing(expected, again) == []


def test_init_and_state_dict_copy():
    model = mlp(norm=True)
    step = mlp_step(model)
    state = ps.init(model, step)
    pointers = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}
    held = {leaf.data_ptr() for leaf in (*state.params.values(), *state.buffers.values())}
    given_back = {leaf.data_ptr() for leaf in ps.state_dict(state).values()}
    assert not pointers & held
    assert not held & given_back


@given(seeds)
def test_running_twice_gives_the_same_bits(seed):
    model, batch = mlp(dropout=0.5, norm=True), rows_of(8)
    step = mlp_step(model, split=2)
    runs = []
    for noise in (0, 1):
        torch.manual_seed(noise)  # the global generator must not matter
        state = ps.init(model, step, seed=seed)
        for _ in range(3):
            state, metrics = step(state, batch)
        runs.append((state, metrics))
    assert differing(*runs) == []


def test_another_seed_gives_other_masks():
    model, batch = mlp(dropout=0.5), rows_of(8)
    step = mlp_step(model)
    one, other = (step(ps.init(model, step, seed=seed), batch)[1]["loss"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_each_update_and_each_microbatch_draws_anew():
    masks = []

    def loss(w, x, key):
        masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
        return ps.Loss((w * x).sum(), weight=len(x))

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.0)))
    state = ps.init(torch.zeros(()), step)
    for _ in range(2):
        state, _ = step(state, torch.ones(2))
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_structure_shapes_and_dtypes_of_the_state_stay(dtype, backend):
    model, batch = mlp(dropout=0.2, norm=True, dtype=dtype), rows_of(8, dtype)
    step = mlp_step(model, split=2)
    state = ps.init(model, step)
    new, metrics = runner(step, backend)(state, batch)
    from purestep.state.spec import difference

    assert difference(state, new) is None
    assert new.params["0.weight"].dtype == dtype
    assert all(value.dim() == 0 for value in metrics.values())
    assert set(metrics) >= {"loss", "grad_norm", "lr", "weight", "updated", "fault", "accuracy"}


def test_nothing_of_a_step_stays_alive():
    """Case 76: the loss and what the module kept for itself are gone when the step returns."""
    import gc
    import weakref

    alive = []

    def loss(model, batch, key):
        hidden = model(batch[0])
        model.last = hidden  # what users do, and what would keep the graph alive
        alive.append(weakref.ref(hidden))
        return ps.Loss(hidden.sum(), weight=len(batch[1]))

    model = mlp(dropout=0.1)
    step = ps.compose(ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.adam(1e-3)))
    state, batch, counts = ps.init(model, step), rows_of(4), []
    for _ in range(12):
        state, metrics = step(state, batch)
        assert alive[-1]() is None
        gc.collect()
        counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert len(set(counts[2:])) == 1
    assert not any(value.requires_grad for value in metrics.values())


def test_a_recurrent_module_does_not_keep_the_state_alive():
    import weakref

    model = torch.nn.GRU(3, 4, batch_first=True)
    step = ps.compose(
        ps.forward(lambda m, x, key: ps.Loss(m(x)[0].sum(), weight=len(x)), model),
        ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)),
    )  # fmt: skip
    state = ps.init(model, step)
    old = weakref.ref(state.params["weight_ih_l0"])
    state, _ = step(state, torch.ones(2, 5, 3))
    assert old() is None
