"""sgd, adam and adamw: torch.optim as oracle over the grid of options, then what a pure optimizer promises beyond."""

import itertools
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch

import purestep as ps
from purestep.state.spec import spec

from .toys import differing, snapshot

OURS = {"sgd": ps.sgd, "adam": ps.adam, "adamw": ps.adamw}
TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SHAPES = {"w": (3, 2), "scalar": (), "empty": (0, 3), "complex": (2,)}


def grid(**options):
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


EVERY_SGD = grid(
    lr=[0.3, 0.01], momentum=[0.0, 0.9], dampening=[0.0, 0.4], nesterov=[False, True],
    weight_decay=[0.0, 0.2], maximize=[False, True],
)  # fmt: skip
SGD = [c for c in EVERY_SGD if not c["nesterov"] or (c["momentum"] and not c["dampening"])]
ADAM = grid(
    lr=[0.3, 0.01], betas=[(0.9, 0.999), (0.6, 0.9), (0.0, 0.99)], eps=[1e-8, 1e-2],
    weight_decay=[0.0, 0.2], amsgrad=[False, True], maximize=[False, True],
)  # fmt: skip
CASES = [("sgd", case) for case in SGD] + [(name, case) for name in ("adam", "adamw") for case in ADAM]
SOME = [("sgd", SGD[-1]), ("sgd", SGD[1]), ("adam", ADAM[7]), ("adamw", ADAM[2])]


def ident(value):
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


def ours(name, case):
    betas = dict(zip(("b1", "b2"), case.get("betas", ()), strict=False))
    return OURS[name](**{key: value for key, value in case.items() if key != "betas"}, **betas)


def random_tree(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    complexes = {torch.float64: torch.complex128, torch.float32: torch.complex64}
    return {
        name: torch.randn(shape, generator=generator, dtype=complexes[dtype] if name == "complex" else dtype)
        for name, shape in SHAPES.items()
        if name != "complex" or dtype in complexes
    }


def run(tx, params, gradients, hyper=None):
    """Every params tree, and the last state."""
    state, seen = tx.init(params), []
    for grads in gradients:
        updates, state = tx.update(grads, state, params, hyper)
        params = ps.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def run_torch(name, case, params, gradients, rates=()):
    leaves = {key: torch.nn.Parameter(value.clone()) for key, value in params.items()}
    optimizer, seen = TORCHS[name](leaves.values(), foreach=False, **case), []
    for grads, lr in itertools.zip_longest(gradients, rates, fillvalue=case["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        for key, leaf in leaves.items():
            leaf.grad = None if grads[key] is None else grads[key].clone()
        optimizer.step()
        seen.append({key: leaf.detach().clone() for key, leaf in leaves.items()})
    return seen


def assert_within(found, wanted, ulp):
    """Within so many ulp of the value, or of 1 where it is smaller (params and gradients are of order 1)."""
    assert found.keys() == wanted.keys()
    for key in wanted:
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (found[key], wanted[key]))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bound = ulp * torch.finfo(b.dtype).eps * b.abs().clamp(min=1.0)
        assert bool(((a - b).abs() <= bound).all()), (key, a, b)


@pytest.mark.parametrize(("name", "case"), CASES, ids=ident)
def test_float64_equals_torch_optim_after_each_of_six_updates(name, case):
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 7)]
    seen, state = run(ours(name, case), params, gradients)
    for found, wanted in zip(seen, run_torch(name, case, params, gradients), strict=True):
        assert_within(found, wanted, ulp=4)
    assert int(state.count) == 6


@pytest.mark.parametrize(("name", "case"), CASES[::5] + SOME, ids=ident)
def test_float32_equals_torch_optim_within_sixteen_ulp(name, case):
    params, gradients = random_tree(0, torch.float32), [random_tree(seed, torch.float32) for seed in range(1, 9)]
    seen, _ = run(ours(name, case), params, gradients)
    assert_within(seen[-1], run_torch(name, case, params, gradients)[-1], ulp=16)


@pytest.mark.parametrize("case", [c for c in SGD if not c["dampening"]], ids=ident)
def test_sgd_equals_torch_optim_with_absent_gradients(case):
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 7)]
    gradients = [{**g, "w": None if n in (0, 3) else g["w"], "complex": None} for n, g in enumerate(gradients)]
    seen, _ = run(ours("sgd", case), params, gradients)
    assert_within(seen[-1], run_torch("sgd", case, params, gradients)[-1], ulp=4)


@pytest.mark.parametrize("name", OURS)
def test_a_schedule_follows_the_count_of_updates(name):
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 7)]
    seen, _ = run(OURS[name](ps.linear(0.5, 0.0, 5)), params, gradients)
    wanted = run_torch(name, {"lr": 1.0}, params, gradients, rates=[0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert_within(seen[-1], wanted[-1], ulp=4)


def test_without_b1_the_mean_is_the_gradient_itself():
    _, state = run(ps.adam(b1=0.0), torch.tensor(0.0), [torch.tensor(1e8), torch.tensor(1.0)])
    assert float(state.mu) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "case"), SOME, ids=ident)
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, case, dtype):
    tx, params = ours(name, case), random_tree(0, dtype)
    before = tx.init(params)
    seen, after = run(tx, params, [random_tree(1, dtype), random_tree(2, dtype)])
    assert (spec(after), spec(seen[-1])) == (spec(before), spec(params))


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.usefixtures("bfloat16_by_default")
def test_case_71_the_count_does_not_stop_at_256_in_bfloat16(decoupled):
    b1, b2, lr, decay, p = 0.9, 0.999, 1e-2, 0.1, torch.linspace(0.1, 1.0, 7, dtype=torch.bfloat16)
    tx = (ps.adamw if decoupled else ps.adam)(lr, b1=b1, b2=b2, weight_decay=decay)
    _, state = run(tx, p, [p * math.sin(n) for n in range(299)])
    update, after = tx.update(p * 0.5, state, p)
    assert (int(after.count), after.count.dtype) == (300, torch.int64)
    p, g, mu, nu = (t.to(torch.float64).numpy() for t in (p, p * 0.5, state.mu, state.nu))
    g = g if decoupled else g + decay * p
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
    wanted = -lr * (mu / (1 - b1**300)) / (np.sqrt(nu / (1 - b2**300)) + 1e-8) - (lr * decay * p if decoupled else 0.0)
    np.testing.assert_allclose(update.to(torch.float64).numpy(), wanted, rtol=2.0**-8)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("lr", [torch.tensor(0.1, dtype=torch.float64), ps.constant_schedule(0.1), lambda count: 0.1])
def test_a_rate_has_the_same_bits_in_every_form(name, lr):
    given = random_tree(0), [random_tree(1), random_tree(2), random_tree(3)]
    assert differing(run(OURS[name](0.1), *given), run(OURS[name](lr), *given)) == []


CASE_73 = {
    "momentum": (ps.sgd(0.1, momentum=0.9), 0.81, 0.90),
    "decay": (ps.sgd(0.1, weight_decay=0.1), 0.8811, 0.89),
    "adamw": (ps.adamw(0.1, weight_decay=0.1), 0.8141, 0.89),
}


@pytest.mark.parametrize(("tx", "zero", "absent"), CASE_73.values(), ids=CASE_73)
def test_case_73_an_absent_gradient_is_not_a_zero_one(tx, zero, absent):
    params = {"w": torch.tensor(1.0, dtype=torch.float64), "other": torch.tensor(1.0, dtype=torch.float64)}
    ones, zeros = ps.map_leaves(torch.ones_like, params), ps.map_leaves(torch.zeros_like, params)
    with_zero, _ = run(tx, params, [ones, zeros])
    with_none, _ = run(tx, params, [ones, {**zeros, "w": None}])
    assert float(with_zero[-1]["w"]) == pytest.approx(zero, abs=5e-5)
    assert float(with_none[-1]["w"]) == pytest.approx(absent, abs=1e-7)
    assert torch.equal(with_none[-1]["other"], with_zero[-1]["other"])


@pytest.mark.parametrize(("name", "case"), SOME, ids=ident)
def test_a_leaf_without_a_gradient_keeps_value_and_moments_bitwise(name, case):
    tx, params = ours(name, case), random_tree(0)
    first, state = run(tx, params, [random_tree(1)])
    updates, after = tx.update({**random_tree(2), "w": None}, state, first[0])
    changed = " ".join(differing((first[0], state), (ps.apply_updates(first[0], updates), after)))
    assert ("'w'" in changed, "'scalar'" in changed, int(after.count)) == (False, True, 2)


@pytest.mark.parametrize(("name", "case"), SOME, ids=ident)
def test_update_changes_nothing_it_is_given(name, case):
    tx, params, grads = ours(name, case), random_tree(0), random_tree(2)
    given = params, grads, (state := run(tx, params, [random_tree(1)])[1])
    before = snapshot(given)
    ps.apply_updates(params, tx.update(grads, state, params)[0])
    assert differing(before, snapshot(given)) == []


def test_a_chain_is_the_composition_of_its_parts():
    first, second = ps.sgd(-0.5, momentum=0.9), ps.adam(0.1)
    tx, params = ps.chain(first, second), random_tree(0)
    whole, one, two = tx.init(params), first.init(params), second.init(params)
    for grads in (random_tree(1), random_tree(2)):
        found, whole = tx.update(grads, whole, params)
        middle, one = first.update(grads, one, params)
        wanted, two = second.update(middle, two, params)
        assert differing((found, whole.states), (wanted, (one, two))) == []


ADAM_VALUES = {"lr": 0.1, "b1": 0.5, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.3}
OVERRIDES = [
    (ps.sgd, {"lr": 0.3}, {"lr": 0.1, "weight_decay": 0.2}),
    (ps.sgd, {"lr": 0.3, "weight_decay": 0.5}, {"lr": 0.1, "weight_decay": 0.0}),
    *((make, {}, ADAM_VALUES) for make in (ps.adam, ps.adamw)),
]


@pytest.mark.parametrize(("make", "base", "other"), OVERRIDES)
def test_values_handed_to_update_replace_those_it_was_built_with(make, base, other):
    params, gradients = random_tree(0), [random_tree(1), random_tree(2)]
    hyper = {name: torch.tensor(value, dtype=torch.float64) for name, value in other.items()}
    assert differing(run(make(**base), params, gradients, hyper), run(make(**other), params, gradients)) == []
    with pytest.raises(ValueError, match=r"no hyperparameter beta.*lr"):
        run(make(**base), params, gradients, {"beta": torch.tensor(0.1)})


both = pytest.mark.parametrize("tx", [ps.sgd(0.1, momentum=0.9), ps.adam()], ids=["sgd", "adam"])


@both
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_case_30_moments_follow_the_name_not_the_position(tx, kind):
    names, value = ("w", "v"), {"w": torch.ones(2), "v": -torch.ones(2)}
    params, turned = kind((n, value[n]) for n in names), kind((n, value[n]) for n in reversed(names))
    _, state = tx.update(params, tx.init(params), params)
    wanted, _ = tx.update(params, state, params)
    if kind is OrderedDict:  # an ordered tree of another order is another tree: refused, never mixed up
        with pytest.raises(ps.StateError):
            tx.update(turned, state, turned)
    else:
        assert differing(tx.update(turned, state, turned)[0], wanted) == []


FOREIGN = {
    "missing": ({"w": (3,)}, "'v'"),
    "extra": ({"w": (3,), "v": (2,), "z": (1,)}, "'z'"),
    "shape": ({"w": (4,), "v": (2,)}, "'w'"),
    "a shape that broadcasts": ({"w": (1,), "v": (2,)}, "'w'"),
}


@both
@pytest.mark.parametrize(("held", "name"), FOREIGN.values(), ids=FOREIGN)
def test_a_state_that_does_not_fit_is_refused_naming_the_leaf(tx, held, name):
    params, foreign = (
        {key: torch.ones(shape) for key, shape in tree.items()} for tree in ({"w": (3,), "v": (2,)}, held)
    )
    with pytest.raises(ps.StateError, match=name):
        tx.update(params, tx.init(foreign), params)


FALLS = ps.linear(0.9, 0.5, 5)
BAD_SGD = {"momentum": (-0.1, 1.1, FALLS), "dampening": (math.nan, FALLS), "nesterov": (True,)}
BAD_ADAM = {"b1": (1, 1.0, -0.1, 1.5, math.nan), "b2": (1.0, -0.1), "eps": (-1e-8, math.nan)}
BAD_ALL = {"lr": (math.nan, math.inf, -math.inf, "0.1", True), "weight_decay": (-0.1, math.inf, None)}
TABLE = {"sgd": BAD_SGD | BAD_ALL, "adam": BAD_ADAM | BAD_ALL, "adamw": BAD_ADAM | BAD_ALL}
BAD = [(which, name, value) for which, bad in TABLE.items() for name, values in bad.items() for value in values]


@pytest.mark.parametrize(("which", "name", "value"), BAD, ids=str)
def test_bad_options_are_refused_by_name(which, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        OURS[which](**{"lr": 0.1, name: value})


def test_combinations_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="nesterov needs"):
        ps.sgd(0.1, nesterov=True, momentum=0.9, dampening=0.1)
    with pytest.raises(ValueError, match="chain"):
        ps.chain()


def sparse_rows(seed):
    return torch.sparse_coo_tensor([[0, 3, 0]], random_tree(seed)["w"], (5, 2), check_invariants=True)


PLAIN = [{}, {"maximize": True}, {"weight_decay": 0.1}]
HEAVY = [{"momentum": 0.9, **more} for more in (*PLAIN, {"dampening": 0.4}, {"nesterov": True})]


@pytest.mark.parametrize("options", PLAIN + HEAVY, ids=str)
def test_sgd_takes_sparse_gradients_as_their_dense_equals(options):
    tx, params = ps.sgd(0.1, **options), {"w": torch.ones(5, 2, dtype=torch.float64)}
    found, _ = run(tx, params, [{"w": sparse_rows(seed)} for seed in range(3)])
    wanted, _ = run(tx, params, [{"w": sparse_rows(seed).to_dense()} for seed in range(3)])
    assert_within(found[-1], wanted[-1], ulp=4)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_refuses_sparse_gradients(name):
    with pytest.raises(ps.StateError, match="sparse"):
        run(OURS[name](), torch.ones(5, 2, dtype=torch.float64), [sparse_rows(0)])
