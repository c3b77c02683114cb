"""Small leaves: many of them are worth less together than the calls that they cost one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["in_order", "is_small"]

_LARGEST = 1 << 15  # elements; a larger leaf is worth kernels of its own
_LINE = 16  # float32 elements of a cache line


def is_small(leaf: Tensor) -> bool:
    """Whether a leaf is better handled together with its siblings."""
    return leaf.layout == torch.strided and 0 < leaf.numel() <= _LARGEST


def in_order(leaves: Sequence[Tensor]) -> list[int]:
    """The order in which leaves lie side by side: those of whole cache lines first, so that most begin at one.

    Example:
        >>> in_order([torch.empty(3), torch.empty(4, 4), torch.empty(5), torch.empty(32)])
        [1, 3, 0, 2]
    """
    return sorted(range(len(leaves)), key=lambda k: leaves[k].numel() % _LINE != 0)
