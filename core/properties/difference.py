"""The first difference between two trees, to the bit: the leaf's path, the element, both values, and how far apart."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from ...state.spec import spec
from ...state.sums import reals
from ...state.tree import Tree, as_tensors, leaves_with_paths

__all__ = ["Difference", "first_difference", "result_difference", "ulp_distance"]


@attrs.frozen
class Difference:
    """One differing leaf.

    Attributes:
        path: of the leaf.
        index: of the first differing element; ``None`` where the forms differ.
        one: value there in the first tree, or its form.
        other: value there in the second.
        ulps: distance in units in the last place; ``None`` for integers, NaN and forms.
        count: how many elements differ.
    """

    path: str
    index: tuple[int, ...] | None
    one: Any
    other: Any
    ulps: int | None
    count: int

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.path}: {self.one} against {self.other}"
        place = f"{self.path}[{', '.join(map(str, self.index))}]" if self.index else self.path
        distance = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return f"{place}: {self.one!r} against {self.other!r}{distance} ({self.count} elements differ)"


def first_difference(
    one: Tree, other: Tree, root: str = "state", *, ulps: int = 0, eps: float | None = None
) -> Difference | None:
    """The first leaf whose bits differ; NaN equals NaN, zero does not equal negative zero.

    Args:
        one: tree of tensors.
        other: tree of the same structure.
        root: how paths start.
        ulps: floating elements that lie at most so many units in the last place apart count as equal, of the largest element
            of the leaf and its neighbours (the other leaves of its dict): a gradient that cancels is nothing but rounding.
        eps: that unit; by default that of the leaf's dtype. A float64 norm of float32 gradients is no better than they are.

    Example:
        >>> print(first_difference({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.0000002])}))
        state['w'][1]: 2.0 against 2.000000238418579, 1 ulp apart (1 elements differ)
    """
    ours, theirs = (dict(leaves_with_paths(as_tensors(tree), root)) for tree in (one, other))
    sizes = _group_sizes(ours) if ulps else {}
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if path not in ours or path not in theirs:
            one_has, other_has = ("present" if path in tree else "absent" for tree in (ours, theirs))
            return Difference(path, None, one_has, other_has, None, 1)
        found = _in_leaf(path, ours[path], theirs[path], ulps, eps, sizes.get(_group(path), 0.0))
        if found is not None:
            return found
    return None


def result_difference(one: Any, other: Any, *, ulps: int = 0, eps: float | None = None) -> Difference | None:
    """The first difference between two results ``(state, metrics)`` of a step."""
    found = first_difference(one[0], other[0], "state", ulps=ulps, eps=eps)
    return first_difference(one[1], other[1], "metrics", ulps=ulps, eps=eps) if found is None else found


def _in_leaf(path: str, one: Any, other: Any, ulps: int, eps: float | None, size: float) -> Difference | None:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        same = type(one) is type(other) and repr(one) == repr(other)
        return None if same else Difference(path, None, repr(one), repr(other), None, 1)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return Difference(path, None, str(spec(one)), str(spec(other)), None, 1)
    one, other = (_plain(x) for x in (one, other))
    differs = _differs(one, other, ulps, eps, size)
    if not bool(differs.any()):
        return None
    index = tuple(int(i) for i in differs.nonzero()[0])
    distance = ulp_distance(one[index], other[index]) if one.is_floating_point() else None
    return Difference(path, index, one[index].item(), other[index].item(), distance, int(differs.sum()))


def _group(path: str) -> str:
    """The dict that a leaf lies in."""
    return path.rpartition("[")[0]


def _group_sizes(leaves: dict[str, Any]) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and _group(path):
            sizes[_group(path)] = max(sizes.get(_group(path), 0.0), _largest(_plain(leaf)))
    return sizes


def _largest(leaf: Tensor) -> float:
    sizes = leaf.detach().abs().to(torch.float64)
    return float(torch.where(torch.isfinite(sizes), sizes, 0.0).max()) if leaf.numel() else 0.0


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return reals(tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu()


def _differs(one: Tensor, other: Tensor, ulps: int, eps: float | None, size: float) -> Tensor:
    if not one.is_floating_point():
        return one != other
    nan = torch.isnan(one) & torch.isnan(other)
    if not ulps:
        return ~nan & ((one != other) | (torch.signbit(one) != torch.signbit(other)))
    a, b = one.to(torch.float64), other.to(torch.float64)
    unit = max(eps or 0.0, torch.finfo(one.dtype).eps) * max(size, _largest(one))
    return ~nan & (a != b) & ~((a - b).abs() <= ulps * unit)


_INTS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _ordered(value: Tensor) -> Tensor:
    """Floats as integers in the same order, neighbours one apart, both zeros at 0."""
    bits = value.contiguous().view(_INTS[value.dtype]).to(torch.int64)
    width = 8 * value.element_size()
    return torch.where(bits < 0, -(bits + 2 ** (width - 1)) if width < 64 else -(bits & (2**63 - 1)), bits)


def ulp_distance(one: Tensor, other: Tensor) -> int | None:
    """How many floating numbers lie between two 0-d tensors of one dtype; ``None`` where one is NaN.

    Example:
        >>> ulp_distance(torch.tensor(1.0), torch.tensor(1.0 + 2.0**-22))
        2
    """
    if bool(torch.isnan(one)) or bool(torch.isnan(other)):
        return None
    return abs(int(_ordered(one)) - int(_ordered(other)))
