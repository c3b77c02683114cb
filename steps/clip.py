"""The clip concern: bound the gradients' norm or their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import attrs
import torch
from torch import Tensor

from ..state.sums import widen
from ..state.torch_private import is_tracing
from ..state.tree import Tree, fill, flatten, map_leaves, unflatten
from .concern import Flow, Stateless
from .norm import check_positive, first_nonfinite, global_norm, refuse_iterator

__all__ = ["Clip", "clip", "clip_by_norm", "clip_by_value"]

NonFinite = Literal["skip", "keep", "raise"]


def clip(
    max_norm: float | None = None,
    *,
    max_value: float | None = None,
    norm_type: float = 2.0,
    nonfinite: NonFinite = "skip",
    where: Callable[[str], bool] | None = None,
) -> Clip:
    r"""Bound the gradients: :math:`g \mapsto g \cdot \min(1,\; c / (\lVert g \rVert_p + 10^{-6}))`, or by value.

    The reported ``grad_norm`` is the norm before clipping.

    Args:
        max_norm: c, in the unit of the gradient norm, > 0; ``math.inf`` only measures.
        max_value: or the largest absolute value of an element (of the real and the imaginary part), > 0.
        norm_type: p, > 0; ``math.inf`` for the largest absolute value.
        nonfinite: what a norm that is not finite means. ``"skip"``: the update does not happen; ``"keep"``: the gradients
            stay as they are; ``"raise"``: an error that names the first leaf, in eager steps only (it reads values).
        where: ``where(path) -> bool``, which leaves are clipped and measured together; all by default. Paths are
            written as in ``grads['0.weight']``. Others pass through.

    Returns:
        A concern, to be called as ``grads -> (grads, norm)``.

    Raises:
        ValueError: if not exactly one bound is given, or a bound or ``norm_type`` is not positive or is NaN.

    Example:
        >>> import torch, purestep as ps
        >>> clipped, norm = ps.clip(max_norm=1.0)({"w": torch.tensor([3.0, 4.0])})
        >>> float(norm), clipped["w"]
        (5.0, tensor([0.6000, 0.8000]))

    Reference:
        Pascanu et al., On the difficulty of training recurrent neural networks, 2012.
    """
    if (max_norm is None) == (max_value is None):
        raise ValueError(f"give either max_norm or max_value, got max_norm={max_norm!r} and max_value={max_value!r}")
    check_positive(max_norm=max_norm, max_value=max_value, norm_type=norm_type)
    if nonfinite not in ("skip", "keep", "raise"):
        raise ValueError(f'nonfinite must be "skip", "keep" or "raise", got {nonfinite!r}')
    return Clip(max_norm, max_value, float(norm_type), nonfinite, where)


@attrs.frozen
class Clip(Stateless):
    """A bound on the gradients; see :func:`clip`."""

    takes: ClassVar[str] = "grads"
    gives: ClassVar[str] = "grads"

    max_norm: float | None
    max_value: float | None
    norm_type: float
    nonfinite: NonFinite
    where: Callable[[str], bool] | None

    def __call__(self, grads: Tree) -> tuple[Tree, Tensor]:
        """The clipped tree and the norm before clipping, 0-d float64, of the leaves that ``where`` chooses.

        Raises:
            ValueError: if ``grads`` is an iterator.
            FloatingPointError: with ``nonfinite="raise"``, naming the first leaf that is not finite.
        """
        refuse_iterator(grads)
        chosen = self._chosen(grads)
        norm = global_norm(chosen, self.norm_type)
        if self.nonfinite == "raise":
            _raise_nonfinite(chosen, norm)
        if self.max_norm is not None:
            clipped, _ = clip_by_norm(chosen, self.max_norm, norm=norm)
        else:
            finite, bound = torch.isfinite(norm), self.max_value or math.inf
            clipped = map_leaves(lambda leaf: _select(finite, _clamp(leaf, bound), leaf), chosen)
        return fill(clipped, grads), norm

    def apply(self, flow: Flow) -> Flow:
        """The flow with clipped gradients, the norm reported if it is that of all leaves, no update if it is not finite."""
        grads, norm = self(flow.value)
        ok = flow.ok & torch.isfinite(norm) if self.nonfinite == "skip" else flow.ok
        measured = {} if self.where is not None else {"grad_norm": norm}
        return flow.replace(value=grads, ok=ok, metrics={**measured, **flow.metrics})

    def _chosen(self, grads: Tree) -> Tree:
        if self.where is None:
            return grads
        values, treedef = flatten(grads)
        paths = (path.codify("grads") for path in treedef.accessors())
        return unflatten(
            treedef, [leaf if self.where(path) else None for path, leaf in zip(paths, values, strict=True)]
        )


def clip_by_norm(
    grads: Tree, max_norm: float | Tensor, *, norm_type: float = 2.0, norm: Tensor | None = None
) -> tuple[Tree, Tensor]:
    r"""Scale ``grads`` so that their joint norm is at most ``max_norm``; unchanged where the norm is not finite.

    The rule of ``torch.nn.utils.clip_grad_norm_``.

    Args:
        grads: tree of floating or complex tensors, already divided by the weight.
        max_norm: positive, in the unit of the norm.
        norm_type: p of the norm.
        norm: the norm, where it is known already.

    Returns:
        The scaled tree (same structure, shapes, dtypes) and the norm before scaling, 0-d float64.

    Raises:
        ValueError: if ``grads`` is an iterator, or a number is not positive.

    Example:
        >>> clip_by_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)[1]
        tensor(5., dtype=torch.float64)
    """
    check_positive(max_norm=max_norm, norm_type=norm_type)
    norm = global_norm(grads, norm_type) if norm is None else norm
    # In float64, so that the factor is rounded once, to the leaf's own dtype.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    return map_leaves(lambda leaf: _scale(leaf, factor), grads), norm


_TINY = 2.0**-100


def _scale(leaf: Tensor, factor: Tensor) -> Tensor:
    """``leaf * factor``, a factor too small for the leaf's dtype applied in two parts (the second a power of two)."""
    wide = widen(leaf)
    dtype = wide.dtype.to_real() if wide.is_complex() else wide.dtype
    rest = torch.where(factor < _TINY, _TINY, 1.0).to(torch.float64)
    first, second = ((x.to(device=leaf.device, dtype=dtype)) for x in (factor / rest, rest))
    return (wide * first * second).to(leaf.dtype)


def clip_by_value(grads: Tree, max_value: float) -> Tree:
    """Clamp every element to ``[-max_value, max_value]``; of a complex leaf the real and the imaginary part.

    Args:
        grads: tree of tensors.
        max_value: positive.

    Raises:
        ValueError: if ``grads`` is an iterator or ``max_value`` is not positive.

    Example:
        >>> clip_by_value({"w": torch.tensor([3.0, -0.5])}, 1.0)
        {'w': tensor([ 1.0000, -0.5000])}
    """
    refuse_iterator(grads)
    check_positive(max_value=max_value)
    return map_leaves(lambda leaf: _clamp(leaf, max_value), grads)


def _clamp(leaf: Tensor, bound: float) -> Tensor:
    if leaf.layout == torch.sparse_coo:
        whole = leaf.coalesce()
        values = _clamp(whole.values(), bound)
        return torch.sparse_coo_tensor(whole.indices(), values, whole.shape, is_coalesced=True, check_invariants=False)
    if leaf.is_complex():
        return torch.view_as_complex(torch.view_as_real(leaf).clamp(-bound, bound))
    return leaf.clamp(-bound, bound)


def _select(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    if one.layout == torch.sparse_coo:  # eager only: there is no where for sparse tensors
        return one if bool(condition) else other
    return torch.where(condition, one, other)


def _raise_nonfinite(grads: Tree, norm: Tensor) -> None:
    if is_tracing() or torch.compiler.is_compiling():
        raise RuntimeError(
            'clip(nonfinite="raise") reads values and works in eager steps only; use "skip" in a compiled step: '
            "metrics['updated'] tells, and ps.first_nonfinite names the leaf"
        )
    if not bool(torch.isfinite(norm)):
        path = first_nonfinite(grads)
        reason = "its sum overflows float64" if path is None else f"the first leaf that is not finite is {path}"
        raise FloatingPointError(f"the gradient norm is {float(norm)}: {reason}")
