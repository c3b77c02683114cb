"""What travels through a step before the division: sums, each with its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from .errors import LossError
from .records import Record, set_fields
from .tree import Tree, register

__all__ = ["Loss", "Sum", "Sums", "reals", "widen"]


def widen(tensor: Tensor) -> Tensor:
    """In at least 32 bits, so that a sum keeps its small terms; other dtypes as they are."""
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def reals(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals, with a last dimension of 2; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _summable(tensor: Tensor) -> Tensor:
    """In a dtype that sums of many do not outgrow: at least 32 bits, integers and flags in 64."""
    return widen(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor.to(torch.int64)


def _as_weight(weight: Any, where: str) -> Tensor | int | float:
    if isinstance(weight, bool) or not isinstance(weight, (Tensor, int, float)):
        raise LossError(f"{where}: weight must be a number or a 0-d tensor, got {weight!r}")
    if isinstance(weight, Tensor):
        if weight.dim() != 0 or weight.is_complex() or weight.dtype == torch.bool:
            raise LossError(
                f"{where}: weight must be a real 0-d tensor, got {weight.dtype} of shape {tuple(weight.shape)}"
            )
        return weight.detach()
    if not (math.isfinite(weight) and weight >= 0):
        raise LossError(f"{where}: weight must be finite and not negative, got {weight}")
    return weight


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    """A 0-d tensor beside ``like``: integers as int64, floats as float64, so that many add up without a drift."""
    if isinstance(value, Tensor):
        return value.to(torch.float64 if value.is_floating_point() else torch.int64)
    return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else torch.float64, device=like.device)


@attrs.frozen(init=False, eq=False, slots=False)
class Sum:
    """A sum and the weight to divide it by, once, after every reduction.

    Attributes:
        total: the sum: 0-d, or of any fixed shape such as one number per class; integers are kept as int64.
        weight: number or 0-d tensor, how many rows or tokens it sums over.

    Raises:
        LossError: if ``total`` is not a tensor or a number, or the weight is negative or not finite.

    Example:
        >>> float(Sum(torch.tensor(6.0), 4).mean())
        1.5
    """

    total: Tensor
    weight: Tensor

    def __init__(self, total: Tensor | float, weight: Tensor | float) -> None:
        weight = _as_weight(weight, "Sum")
        if isinstance(total, bool) or not isinstance(total, (Tensor, int, float)):
            raise LossError(f"Sum: total must be a tensor or a number, got {total!r}")
        beside = next((x for x in (total, weight) if isinstance(x, Tensor)), torch.empty(0))
        if not isinstance(total, Tensor):
            total = torch.full((), float(total), dtype=torch.float32, device=beside.device)
        set_fields(self, total=_summable(total.detach()), weight=_scalar(weight, beside))

    def mean(self) -> Tensor:
        """``total / weight``: NaN where the weight is zero. The mean of integers is float32."""
        total = self.total
        if total.is_complex():
            return total / self.weight.to(total.real.dtype)
        if total.is_floating_point():
            return total / self.weight.to(total.dtype)
        return (total.to(torch.float64) / self.weight.to(torch.float64)).to(torch.float32)


@attrs.frozen(init=False, eq=False, slots=False)
class Loss(Record):
    """What a loss function returns: a sum over rows or tokens with its weight, never a mean.

    Attributes:
        total: 0-d tensor, the sum to be differentiated.
        weight: number or 0-d tensor, how many rows or tokens ``total`` sums over; must not be negative.
        metrics: further sums by name, reduced as the loss is.
        carry: tree of tensors handed to the next chunk of a sequence, or ``None``.
        buffers: the module's buffers after the forward, filled by ``forward``.

    Raises:
        LossError: if ``total`` is not a real floating 0-d tensor, the weight is missing, negative or not finite, or a
            metric is not a ``Sum``.

    Example:
        >>> per_row = torch.tensor([1.0, 2.0, 3.0])
        >>> float(Loss(per_row.sum(), weight=3).mean())
        2.0
    """

    total: Tensor
    weight: Tensor
    metrics: dict[str, Sum]
    carry: Tree
    buffers: dict[str, Tensor] | None

    def __init__(
        self,
        total: Tensor,
        weight: Tensor | float | None = None,
        metrics: Mapping[str, Sum] | None = None,
        carry: Tree = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        if not isinstance(total, Tensor):
            raise LossError(f"Loss: total must be a tensor, got {total!r}")
        if total.dim() != 0 or not total.is_floating_point():
            raise LossError(
                "Loss: total must be a real floating 0-d tensor, the sum over the microbatch; got "
                f"{total.dtype} of shape {tuple(total.shape)}. Call .sum() on it and give the number of rows as weight"
            )
        if weight is None:
            raise LossError(
                "Loss: weight is missing. A mean cannot be added to other means: return the sum over the rows or tokens "
                "and say over how many, as in ps.Loss(per_row.sum(), weight=len(per_row))"
            )
        for name, metric in (metrics or {}).items():
            if not isinstance(metric, Sum):
                raise LossError(f"Loss: metrics[{name!r}] must be ps.Sum(total, weight), got {type(metric).__name__}")
        set_fields(
            self,
            total=total,
            weight=_scalar(_as_weight(weight, "Loss"), total),
            metrics=dict(metrics or {}),
            carry=carry,
            buffers=buffers,
        )

    def mean(self) -> Tensor:
        """``total / weight``, detached."""
        return Sum(self.total, self.weight).mean()


@attrs.frozen(init=False, eq=False, slots=False)
class Sums(Record):
    """What one or many microbatches add up to; adding two of them leaf by leaf is the whole of a reduction.

    Attributes:
        grads: tree like the params: sums of gradients, ``None`` where a leaf is frozen or unused.
        loss: 0-d tensor, the sum of the losses.
        weight: 0-d tensor, the sum of the weights.
        metrics: by name.
        buffers: by name, what ``accumulate`` makes the buffers of after the update.
        samples: 0-d int64, rows seen.
        unusable: 0-d int64, microbatches whose weight is negative or not finite.
    """

    grads: Tree
    loss: Tensor
    weight: Tensor
    metrics: dict[str, Sum]
    buffers: dict[str, Tensor]
    samples: Tensor
    unusable: Tensor

    def __init__(
        self,
        grads: Tree,
        loss: Tensor,
        weight: Tensor,
        metrics: dict[str, Sum],
        buffers: dict[str, Tensor],
        samples: Tensor,
        unusable: Tensor,
    ) -> None:
        set_fields(
            self,
            grads=grads,
            loss=loss,
            weight=weight,
            metrics=metrics,
            buffers=buffers,
            samples=samples,
            unusable=unusable,
        )


for _record in (Sum, Loss, Sums):
    register(_record)
