"""The form of a call: everything that a compiled step was compiled for. Our graphs carry no guards; this is the key."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from ..state.errors import BatchError

__all__ = ["ambient", "forms", "static_change"]


def forms(values: list[Any]) -> tuple[Any, ...]:
    """Shape, strides, dtype and device of each tensor; other leaves by type and value.

    Raises:
        BatchError: if a leaf that is not a tensor cannot be compared by value.
    """
    return tuple([_form(leaf) for leaf in values])


_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(...))


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in _VALUES or isinstance(leaf, enum.Enum):
        return type(leaf), repr(leaf) if isinstance(
            leaf, (float, complex)
        ) else leaf  # tells -0.0 from 0.0; NaN equals NaN
    raise BatchError(
        f"a batch leaf of type {type(leaf).__name__} is neither a tensor nor a plain value, so a compiled step cannot tell "
        "whether it changed. Hand in a tensor, or run the step eagerly"
    )


def ambient() -> tuple[Any, ...]:
    """Settings outside of the inputs that change what is compiled or its bits."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


def static_change(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[int, str] | None:
    """The place of the first plain value that differs between two forms whose tensors are alike, and both in words."""
    found = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if not found or any(len(form[i]) != _STATIC for i in found for form in (before, after)):
        return None
    was, now = (
        value if kind in (float, complex) else repr(value) for kind, value in (before[found[0]], after[found[0]])
    )
    return found[0], f"from {was} to {now}"


_STATIC = 2  # the form of a leaf that is not a tensor: its type and value
