"""The norm of a tree of gradients, without overflow, and which leaf is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..state.small import in_order, is_small
from ..state.tree import Tree, leaves, leaves_with_paths

__all__ = ["check_positive", "first_nonfinite", "global_norm", "refuse_iterator"]


def global_norm(grads: Tree, norm_type: float = 2.0) -> Tensor:
    r"""The p-norm over all leaves together, without overflow: :math:`m \, (\sum |g_i / m|^p)^{1/p}`.

    Leaves of up to 32 bits are summed in float64, where no square of a float32 overflows; float64 leaves, and any for a
    large p, are scaled by their largest absolute value m first.

    Args:
        grads: tree of floating or complex tensors, dense or sparse; ``None`` and empty leaves count as nothing.
        norm_type: p, > 0, or ``math.inf``.

    Returns:
        0-d float64; zero for a tree without elements.

    Raises:
        ValueError: if ``grads`` is an iterator or ``norm_type`` is not positive.

    Example:
        >>> global_norm({"w": torch.tensor([3.0, 4.0]), "unused": None})
        tensor(5., dtype=torch.float64)
    """
    refuse_iterator(grads)
    check_positive(norm_type=norm_type)
    tensors = [_values(leaf) for leaf in leaves(grads)]
    tensors = [leaf for leaf in tensors if leaf.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([_leaf_norm(leaf, norm_type).to(tensors[0].device) for leaf in _side_by_side(tensors)])
    return _scaled_norm(norms, norm_type)


def _side_by_side(tensors: list[Tensor]) -> list[Tensor]:
    """The small tensors of each dtype as one: a norm of hundreds of leaves is one pass."""
    families: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for leaf in tensors:
        if is_small(leaf):
            families.setdefault((leaf.dtype, leaf.device), []).append(leaf)
    joined = [
        torch.cat([family[k].reshape(-1) for k in in_order(family)]) if len(family) > 1 else family[0]
        for family in families.values()
    ]
    return [*joined, *(leaf for leaf in tensors if not is_small(leaf))]


def _values(leaf: Tensor) -> Tensor:
    """The elements of a sparse gradient with its repeated rows added up."""
    return leaf.coalesce().values() if leaf.layout == torch.sparse_coo else leaf


_UNSCALED = 6.0  # up to this p, a power of any float32 number stays within float64


def _leaf_norm(leaf: Tensor, norm_type: float) -> Tensor:
    wide = torch.complex128 if leaf.is_complex() else torch.float64
    if leaf.dtype == wide or norm_type > _UNSCALED:
        return _scaled_norm(leaf.to(wide).abs(), norm_type)
    norm: Tensor = torch.linalg.vector_norm(leaf, norm_type, dtype=wide)
    return norm


def _scaled_norm(sizes: Tensor, norm_type: float) -> Tensor:
    """The norm of non-negative numbers: scaled by the largest, so that no power over- or underflows."""
    largest = sizes.max()
    if math.isinf(norm_type):
        return largest
    usable = torch.isfinite(largest) & (largest > 0)
    scale = torch.where(usable, largest, torch.ones_like(largest))
    norm: Tensor = torch.linalg.vector_norm(sizes / scale, norm_type) * scale
    return norm


def first_nonfinite(tree: Tree, root: str = "grads") -> str | None:
    """The path of the first leaf with an element that is not finite; ``None`` if there is none. Reads values.

    Example:
        >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
        "grads['b']"
    """
    for path, leaf in leaves_with_paths(tree, root):
        if not bool(torch.isfinite(_values(leaf)).all()):
            return path
    return None


def check_positive(**bounds: float | Tensor | None) -> None:
    """Refuse a bound that is no positive number; tensors and ``None`` pass.

    Raises:
        ValueError: naming the argument and its value.
    """
    for name, bound in bounds.items():
        if bound is None or isinstance(bound, Tensor):
            continue
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0:
            raise ValueError(f"{name} must be a positive number, got {bound!r}; leave the concern out for no clipping")


def refuse_iterator(grads: Tree) -> None:
    """Refuse what can be read only once.

    Raises:
        ValueError: if ``grads`` is an iterator.
    """
    if isinstance(grads, Iterator):
        raise ValueError("grads must be a tree of tensors, got an iterator, which can be read only once")
