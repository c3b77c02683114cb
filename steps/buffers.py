r"""Buffers over microbatches: what one adds to the sums, and what the sums make of a buffer.

Each microbatch starts from the update's opening buffers :math:`b` and leaves :math:`b_i` behind. Floating buffers become
the weighted mean :math:`\sum_i w_i b_i / \sum_i w_i`, integers move by the rounded mean of their changes, so that a
counter moves by one. A buffer that no microbatch wrote keeps its bits; a microbatch of weight zero adds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..state.sums import reals

__all__ = ["buffer_mean", "buffer_sum"]

_NOTHING = -0.0  # the number that changes no other when added, a negative zero neither


def buffer_sum(after: Tensor, opening: Tensor, weight: Tensor) -> Tensor:
    """What one microbatch adds: to be summed, and handed to :func:`buffer_mean`.

    In float64 the product of a float32 with a weight, divided by that weight, rounds to the float32 again. A 64-bit buffer
    has no wider dtype to do so: beside the products travels a count of the elements that were written.
    """
    if not _is_inexact(opening):
        change = after.to(torch.int64) - opening.to(torch.int64)
        return torch.where(weight > 0, change.to(torch.float64) * weight, _NOTHING)
    now, before = reals(after), reals(opening)
    total = torch.where(weight > 0, now.to(torch.float64) * weight, _NOTHING)
    if before.dtype != torch.float64:
        return total
    written = (now != before) & ~((now != now) & (before != before))
    return torch.stack([total, (written & (weight > 0)).to(torch.float64)])


def buffer_mean(total: Tensor, opening: Tensor, weight: Tensor) -> Tensor:
    """The buffer after an update from the summed parts; the opening one where the summed weight is zero."""
    before = reals(opening)
    if not _is_inexact(opening):
        mean = before.to(torch.int64) + (total / weight).round().to(torch.int64)
    elif before.dtype == torch.float64:
        mean = torch.where(total[1] > 0, total[0] / weight, before)
    else:
        mean = total / weight
    chosen = torch.where(weight > 0, mean.to(before.dtype), before)
    return torch.view_as_complex(chosen) if opening.is_complex() else chosen


def _is_inexact(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
