"""Hyperparameters: a number, a 0-d tensor or a schedule; what range each may have, and its value at a count."""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from ..state.constants import constant
from .schedules import Schedule

__all__ = ["ANY", "Hyper", "Range", "check_hyper", "evaluate"]

Hyper: TypeAlias = "float | Tensor | Schedule"


@attrs.frozen
class Range:
    """What a hyperparameter may be: finite, at least ``low``, at most ``high`` (or ``below`` it).

    Attributes:
        low: smallest value.
        high: largest value.
        below: whether ``high`` itself is out.
    """

    low: float = 0.0
    high: float = math.inf
    below: bool = False

    def __str__(self) -> str:
        return f"in [{self.low}, {self.high}{')' if self.below or math.isinf(self.high) else ']'}"

    def holds(self, value: Tensor) -> Tensor:
        """Whether a value lies inside, elementwise."""
        upper = value < self.high if self.below else value <= self.high
        return torch.isfinite(value) & (value >= self.low) & upper


ANY = Range(-math.inf)


def evaluate(value: Hyper, count: Tensor | int) -> Tensor:
    """The value of a hyperparameter at a count: a number, a 0-d tensor, or a schedule of the count.

    Returns:
        0-d float64 tensor.

    Raises:
        TypeError: if a schedule returns anything but a number or a tensor.
        ValueError: if the value is not 0-d.

    Example:
        >>> from purestep import linear
        >>> evaluate(linear(1.0, 0.0, 4), 1)
        tensor(0.7500, dtype=torch.float64)
    """
    count = count if isinstance(count, Tensor) else torch.tensor(count)
    found = value(count) if callable(value) and not isinstance(value, Tensor) else value
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return torch.full((), float(found), dtype=torch.float64, device=count.device)
    if not isinstance(found, Tensor):
        raise TypeError(f"a schedule must return a number or a 0-d tensor, got {found!r}")
    if found.dim():
        raise ValueError(f"a hyperparameter must be 0-d, got shape {tuple(found.shape)}")
    return found.to(torch.float64)


def check_hyper(name: str, value: Hyper, within: Range = ANY) -> Hyper:
    """The value, if it is a schedule, a 0-d tensor (which is copied) or a number within the range.

    Raises:
        TypeError: if it is none of these.
        ValueError: naming the argument, its value and the range.
    """
    if callable(value) and not isinstance(value, (Tensor, type)):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"{name} must be a number, a 0-d tensor or a schedule, got {value!r}")
    if isinstance(value, Tensor) and value.dim():
        raise ValueError(f"{name} must be 0-d, got shape {tuple(value.shape)}")
    if not bool(within.holds(torch.as_tensor(value, dtype=torch.float64))):
        raise ValueError(f"{name} must be finite and {within}, got {value}")
    # A tensor of the caller's may change later, which a compiled step could not see.
    return constant(value) if isinstance(value, Tensor) else value
