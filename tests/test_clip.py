"""Clipping against torch.nn.utils and numpy, where numbers overflow or are not finite, and as a property."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import purestep as ps

from .toys import differing, same_bits, snapshot, toy_state, toy_step

NORMS = [1.0, 2.0, 3.5, math.inf]
norms = pytest.mark.parametrize("p", NORMS)
FLOATS = [torch.float32, torch.float64]
KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
ELEMENT = st.floats(-1e30, 1e30, allow_subnormal=False)
TREES = st.lists(st.lists(ELEMENT, max_size=5), min_size=1, max_size=4)
BOUND = st.floats(1e-3, 1e3)


def random_grads(dtype=torch.float64, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 3), "scalar": (), "empty": (0, 2), "bias": (5,)}
    leaves = {name: scale * torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}
    return {"layers": [leaves.pop("w"), None], **leaves, "frozen": None}


def tensors(tree):
    return list(snapshot(tree).values())


def numpy_norm(tree, p):
    """The p-norm over all elements, in long double."""
    flat = [t.detach().to(torch.complex128).numpy().reshape(-1) for t in tensors(tree)]
    sizes = np.abs(np.concatenate([np.zeros(1), *flat])).astype(np.longdouble)
    return float(sizes.max()) if math.isinf(p) else float((sizes**p).sum() ** (1 / np.longdouble(p)))


def params_of(tree):
    params = [torch.nn.Parameter(torch.zeros_like(t)) for t in tensors(tree)]
    for param, grad in zip(params, tensors(tree), strict=True):
        param.grad = grad
    return params


def torch_clipped(tree, max_norm, p):
    params = params_of(tree)
    filled = [param for param in params if param.numel()]  # torch has no infinity norm of an empty tensor
    norm = torch.nn.utils.clip_grad_norm_(filled, max_norm, norm_type=p, foreach=False)
    return [param.grad for param in params], norm


def sparse(*values):
    return torch.sparse_coo_tensor([[1, 3, 1]], values, (5,), dtype=torch.float64, check_invariants=True)


@norms
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e3])
def test_clipping_equals_torch_for_every_norm(p, dtype, rtol, max_norm):
    grads = random_grads(dtype)
    wanted, total = torch_clipped(grads, max_norm, p)
    for clipped, norm in (ps.clip(max_norm, norm_type=p)(grads), ps.clip_by_norm(grads, max_norm, norm_type=p)):
        assert (clipped["frozen"], clipped["layers"][1]) == (None, None)
        torch.testing.assert_close(norm, total.double(), rtol=rtol, atol=0)
        for found, want in zip(tensors(clipped), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=4 * rtol, atol=0)
    torch.testing.assert_close(ps.global_norm(grads, p), total.double(), rtol=rtol, atol=0)


@norms
@pytest.mark.parametrize("dtype", KINDS)
def test_norm_and_clipped_tree_equal_numpy_in_every_dtype(p, dtype):
    grads, eps = random_grads(dtype, scale=3.0), torch.finfo(dtype).eps
    clipped, norm = ps.clip(2.0, norm_type=p)(grads)
    wanted = numpy_norm(grads, p)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(wanted, rel=1e-14)
    for before, after in zip(tensors(grads), tensors(clipped), strict=True):
        assert after.dtype == dtype
        exact = before.to(torch.complex128) * (2.0 / (wanted + 1e-6))
        torch.testing.assert_close(after.to(torch.complex128), exact, rtol=2 * eps, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_value_equals_torch(dtype):
    params = params_of(grads := random_grads(dtype, scale=2.0))
    torch.nn.utils.clip_grad_value_(params, 0.7, foreach=False)
    clipped, norm = ps.clip(max_value=0.7)(grads)
    for tree in (clipped, ps.clip_by_value(grads, 0.7)):
        assert [torch.equal(t, p.grad) for t, p in zip(tensors(tree), params, strict=True)] == [True] * 4
    assert float(norm) == pytest.approx(numpy_norm(grads, 2.0), rel=1e-6)


def test_by_value_clamps_both_parts_of_a_complex_number():
    clipped = ps.clip_by_value(torch.tensor([3 - 0.5j, -0.1 + 9j]), 1.0)
    assert torch.equal(clipped, torch.tensor([1 - 0.5j, -0.1 + 1j]))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_case_31_three_four_clips_to_the_unit_norm_and_reports_five(scale):
    clipped, norm = ps.clip(max_norm=1.0)(torch.tensor([3.0, 4.0], dtype=torch.float64) * scale / scale)
    assert clipped.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert float(norm) == 5.0


BIG = {
    "1e20 in float32": ([1e20, 1e20], torch.float32, 2.0),
    "1e200 in float64": ([1e200, -1e200], torch.float64, 2.0),
    "1e300 in float64, p 3.5": ([3e300, 4e300], torch.float64, 3.5),
    "1e30 in float32, p 20": ([1e30, 2e30], torch.float32, 20.0),
    "1e38 in bfloat16": ([1e38, 1e38], torch.bfloat16, 2.0),
    "6e4 in float16": ([6e4, 6e4], torch.float16, 2.0),
}


@pytest.mark.parametrize(("values", "dtype", "p"), BIG.values(), ids=BIG)
def test_case_34_large_finite_gradients_are_clipped_in_their_direction(values, dtype, p):
    leaf, eps = torch.tensor(values, dtype=dtype), torch.finfo(dtype).eps
    exact = leaf.double() / leaf.double().abs().max()
    exact = exact / torch.linalg.vector_norm(exact, p)
    for size in (1, 2):
        clipped, norm = ps.clip(1.0, norm_type=p)(leaf.split(size))
        torch.testing.assert_close(torch.cat(clipped).double(), exact, rtol=4 * eps, atol=0)
        assert float(norm) == pytest.approx(abs(values[0]) / abs(float(exact[0])), rel=4 * eps)


@pytest.mark.parametrize("max_norm", [1e-3, 1e-5, 1e-7])
def test_a_small_bound_on_large_float32_gradients_holds(max_norm):
    clipped, _ = ps.clip(max_norm)(torch.tensor([1e38, 2e38]))
    assert clipped.tolist() == pytest.approx([max_norm / 5**0.5, 2 * max_norm / 5**0.5], rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [*NORMS, 20.0])
@pytest.mark.parametrize(("value", "dtype"), [(1e-30, torch.float32), (1e-44, torch.float32), (1e-250, torch.float64)])
def test_case_34_small_gradients_have_a_norm_and_stay_as_they_are(value, dtype, p):
    grads = {"a": torch.full((3,), value, dtype=dtype)}
    clipped, norm = ps.clip(1.0, norm_type=p)(grads)
    assert differing(clipped, grads) == []
    assert float(norm) == pytest.approx(float(grads["a"][0]) * 3.0 ** (1 / p), rel=1e-6, abs=2e-45)


BROKEN = {"inf": [math.inf, 1.0], "-inf": [-math.inf, 1.0], "nan": [math.nan, 1.0], "both": [math.inf, math.nan]}
broken = pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)


@broken
@norms
@pytest.mark.parametrize("bound", [0.5, math.inf])
def test_case_34_kept_gradients_are_bitwise_those_that_came(values, p, bound):
    grads = {"a": torch.tensor(values), "b": torch.tensor(7.0)}
    clipped, norm = ps.clip(bound, norm_type=p, nonfinite="keep")(grads)
    assert not math.isfinite(float(norm))
    assert differing(clipped, grads) == []


@broken
def test_keep_holds_for_a_bound_on_values_too(values):
    grads = {"a": torch.tensor(values), "b": torch.tensor(7.0)}
    assert differing(ps.clip(max_value=0.5, nonfinite="keep")(grads)[0], grads) == []


@broken
@pytest.mark.parametrize("bound", [{"max_norm": 0.5}, {"max_value": 0.5}], ids=str)
def test_case_34_raising_names_the_first_leaf(values, bound):
    grads = {"a": torch.ones(2), "b": [torch.ones(2), torch.tensor(values)], "c": torch.tensor(math.nan)}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]\[1\]"):
        ps.clip(nonfinite="raise", **bound)(grads)
    assert ps.first_nonfinite(grads) == "grads['b'][1]"
    assert ps.first_nonfinite({"a": torch.ones(2), "b": None}) is None


def test_raising_names_a_leaf_among_those_that_are_clipped():
    grads = {"a": torch.tensor(math.nan), "b": torch.tensor(math.nan)}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]"):
        ps.clip(1.0, nonfinite="raise", where=lambda path: "'b'" in path)(grads)


def test_raising_blames_no_gradient_that_is_finite():
    clipped, _ = ps.clip(1.0, nonfinite="raise")({"a": torch.tensor([3e38, 3e38])})  # the norm fits float64 alone
    assert clipped["a"].tolist() == pytest.approx([0.5**0.5] * 2, rel=1e-6)


@pytest.mark.parametrize(("nonfinite", "updated", "w"), [("skip", 0, 0.0), ("keep", 1, -math.inf)])
def test_a_step_skips_or_keeps_a_gradient_that_is_not_finite(nonfinite, updated, w):
    step = toy_step(1.0, ps.clip(1.0, nonfinite=nonfinite))
    state, metrics = step(toy_state(step), torch.tensor([math.inf, 1.0], dtype=torch.float64))
    assert (int(metrics["updated"]), float(state.params), float(metrics["grad_norm"])) == (updated, w, math.inf)
    state, metrics = step(toy_state(step), torch.tensor([3.0, 5.0], dtype=torch.float64))
    assert float(metrics["grad_norm"]) == 4.0
    assert float(state.params) == pytest.approx(-1.0, rel=1e-6)


def test_case_32_a_window_is_clipped_once():
    step = toy_step(1.0, ps.clip(1.0), split=2)
    state, _ = step(toy_state(step), torch.tensor([3.0, -1.0], dtype=torch.float64))
    assert float(state.params) == pytest.approx(-1.0, rel=2e-6)


def test_a_subset_is_measured_and_clipped_together_and_the_rest_passes():
    grads = {"a": torch.tensor([3.0]), "b": {"a": torch.tensor([4.0]), "c": torch.tensor([100.0])}, "d": None}
    clipped, norm = ps.clip(1.0, where=lambda path: path.endswith("['a']"))(grads)
    assert float(norm) == 5.0
    assert [float(clipped["a"]), float(clipped["b"]["a"])] == pytest.approx([0.6, 0.8], rel=1e-6)
    assert same_bits(clipped["b"]["c"], grads["b"]["c"])
    by_value, _ = ps.clip(max_value=1.0, where=lambda path: path.endswith("['c']"))(grads)
    assert [float(by_value["a"]), float(by_value["b"]["c"])] == [3.0, 1.0]


@norms
@pytest.mark.parametrize("grads", [{}, {"a": None}, {"a": torch.zeros(0)}, [], {"a": torch.zeros(3)}], ids=str)
def test_a_tree_without_anything_has_norm_zero_and_stays(grads, p):
    for bound in ({"max_norm": 1.0}, {"max_value": 1.0}):
        clipped, norm = ps.clip(norm_type=p, **bound)(grads)
        assert float(norm) == 0.0
        assert len(clipped) == len(grads)
        assert differing(clipped, grads) == []


@norms
def test_sparse_gradients_clip_as_their_dense_equals(p):
    grads = {"e": sparse(3.0, -4.0, 2.0), "w": torch.tensor([1.0, -6.0], dtype=torch.float64)}
    dense = {"e": grads["e"].to_dense(), "w": grads["w"]}
    for bound in ({"max_norm": 1.0}, {"max_value": 3.5}):
        clipped, norm = ps.clip(norm_type=p, **bound)(grads)
        wanted, dense_norm = ps.clip(norm_type=p, **bound)(dense)
        torch.testing.assert_close(norm, dense_norm, rtol=1e-15, atol=0)
        assert clipped["e"].layout == torch.sparse_coo
        torch.testing.assert_close(clipped["e"].to_dense(), wanted["e"], rtol=1e-15, atol=0)
    assert ps.first_nonfinite({"e": sparse(1.0, math.nan, 0.0)}) == "grads['e']"


USES = {
    "clip": ps.clip(1.0),
    "clip_by_norm": lambda grads: ps.clip_by_norm(grads, 1.0),
    "clip_by_value": lambda grads: ps.clip_by_value(grads, 1.0),
    "global_norm": ps.global_norm,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_case_35_an_iterator_is_refused(use):
    for grads in (iter([torch.ones(2)]), (t for t in [torch.ones(2)])):
        with pytest.raises((ValueError, TypeError), match="iterator"):
            use(grads)


@pytest.mark.parametrize("bad", [-1.0, math.nan, 0.0, -math.inf, True, "1", None])
@pytest.mark.parametrize("name", ["max_norm", "max_value", "norm_type"])
def test_case_35_bad_bounds_are_refused_by_name_when_built(name, bad):
    if name != "norm_type" or bad is not None:
        with pytest.raises((ValueError, TypeError), match=name):
            ps.clip(**({"max_norm": 1.0} if name == "norm_type" else {}), **{name: bad})


FUNCTIONS = {"max_norm": ps.clip_by_norm, "max_value": ps.clip_by_value, "norm_type": ps.global_norm}


@pytest.mark.parametrize("bad", [-1.0, math.nan, 0.0])
@pytest.mark.parametrize(("name", "use"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_case_35_the_functions_refuse_bad_numbers_by_name(name, use, bad):
    with pytest.raises(ValueError, match=name):
        use({"w": torch.tensor([3.0, 4.0])}, bad)


def test_other_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"max_norm=1\.0 and max_value=1\.0"):
        ps.clip(1.0, max_value=1.0)
    with pytest.raises(ValueError, match=r"nonfinite.*'stop'"):
        ps.clip(1.0, nonfinite="stop")


@given(TREES, BOUND, st.sampled_from(NORMS))
def test_the_clipped_norm_holds_and_the_direction_is_kept(values, bound, p):
    grads = [torch.tensor(row, dtype=torch.float64) for row in values]
    clipped, norm = ps.clip(bound, norm_type=p)(grads)
    assert numpy_norm(clipped, p) <= bound * (1 + 1e-14)
    factor = min(1.0, bound / (numpy_norm(grads, p) + 1e-6))
    torch.testing.assert_close(clipped, [grad * factor for grad in grads], rtol=1e-14, atol=1e-320)
    again, _ = ps.clip(bound, norm_type=p)(clipped)
    torch.testing.assert_close(again, clipped, rtol=1e-6 / bound + 1e-14, atol=1e-320)
    assert float(norm) == pytest.approx(numpy_norm(grads, p), rel=1e-14)


@given(TREES, st.sampled_from(NORMS), st.sampled_from(FLOATS))
def test_gradients_below_the_bound_keep_their_bits(values, p, dtype):
    grads = [torch.tensor(row, dtype=dtype) for row in values]
    clipped, _ = ps.clip(1.001 * numpy_norm(grads, p) + 1e-3, norm_type=p)(grads)
    assert differing(clipped, grads) == []


def test_clipping_changes_nothing_it_is_given():
    grads = random_grads(scale=9.0)
    before = snapshot(grads)
    for use in USES.values():
        use(grads)
    assert differing(before, snapshot(grads)) == []
