"""Schedules: pure functions from the count of updates to a value.

A schedule has no state: the value at count n is the same whether the run came to n at once or after a resume. Values are
0-d float64 tensors, so that they change from step to step without a new compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

__all__ = [
    "Schedule",
    "constant_schedule",
    "cosine",
    "linear",
    "piecewise",
    "warmup_cosine",
]

Schedule: TypeAlias = Callable[[Tensor], Tensor]


def _finite(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")


def _steps(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int (updates), got {value!r}")


def _real(count: Tensor) -> Tensor:
    return count.to(torch.float64)


@attrs.frozen
class _Constant:
    value: float

    def __call__(self, count: Tensor) -> Tensor:
        return torch.full_like(_real(count), self.value)


def constant_schedule(value: float) -> Schedule:
    """The same value at every count.

    Raises:
        ValueError: if it is not finite.

    Example:
        >>> float(constant_schedule(0.1)(torch.tensor(7)))
        0.1
    """
    _finite(value=value)
    return _Constant(value)


@attrs.frozen
class _Linear:
    start: float
    end: float
    steps: int

    def __call__(self, count: Tensor) -> Tensor:
        share = (_real(count) / self.steps).clamp(0.0, 1.0)
        return self.start * (1.0 - share) + self.end * share  # exact at both ends


def linear(start: float, end: float, steps: int) -> Schedule:
    r"""From ``start`` to ``end`` in a straight line: :math:`a + (b - a) \min(n / N, 1)`.

    Args:
        start: value at count 0.
        end: value from count ``steps`` on.
        steps: N, in updates.

    Raises:
        ValueError: if a value is not finite or ``steps`` is not a positive int.

    Example:
        >>> float(linear(1.0, 0.0, 4)(torch.tensor(3)))
        0.25
    """
    _finite(start=start, end=end)
    _steps(steps=steps)
    return _Linear(start, end, steps)


@attrs.frozen
class _Cosine:
    peak: float
    floor: float
    total: int

    def __call__(self, count: Tensor) -> Tensor:
        share = (_real(count) / self.total).clamp(0.0, 1.0)
        height = (1.0 + torch.cos(math.pi * share)) / 2.0
        return self.peak * height + self.floor * (1.0 - height)  # exact at both ends


def cosine(peak: float, total: int, floor: float = 0.0) -> Schedule:
    r"""Half a cosine from ``peak`` to ``floor``: :math:`f + (p - f)(1 + \cos(\pi n / N)) / 2`.

    Args:
        peak: value at count 0.
        total: N, in updates; ``floor`` from there on.
        floor: the last value.

    Raises:
        ValueError: if a value is not finite or ``total`` is not a positive int.

    Example:
        >>> float(cosine(2.0, 10)(torch.tensor(5)))
        1.0

    Reference:
        Loshchilov, Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
    """
    _finite(peak=peak, floor=floor)
    _steps(total=total)
    return _Cosine(peak, floor, total)


@attrs.frozen
class _WarmupCosine:
    rise: _Linear
    fall: _Cosine

    def __call__(self, count: Tensor) -> Tensor:
        return torch.where(count < self.rise.steps, self.rise(count), self.fall(count - self.rise.steps))


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0, start: float = 0.0) -> Schedule:
    """A straight rise from ``start`` to ``peak`` over ``warmup`` updates, then half a cosine to ``floor`` at ``total``.

    Args:
        peak: the largest value, at count ``warmup``.
        warmup: updates of the rise.
        total: updates in all, more than ``warmup``.
        floor: the last value.
        start: value at count 0.

    Raises:
        ValueError: if a value is not finite or ``total`` is not more than ``warmup``.

    Example:
        >>> schedule = warmup_cosine(peak=1.0, warmup=10, total=110)
        >>> [float(schedule(torch.tensor(n))) for n in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _finite(peak=peak, floor=floor, start=start)
    _steps(warmup=warmup, total=total)
    if total <= warmup:
        raise ValueError(f"total must be more than warmup, got total={total} and warmup={warmup}")
    return _WarmupCosine(_Linear(start, peak, warmup), _Cosine(peak, floor, total - warmup))


@attrs.frozen
class _Piecewise:
    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, count: Tensor) -> Tensor:
        value = torch.full_like(_real(count), self.values[0])
        for boundary, after in zip(self.boundaries, self.values[1:], strict=True):
            value = torch.where(count >= boundary, after, value)
        return value


def piecewise(start: float, changes: Mapping[int, float]) -> Schedule:
    """``start``, and from each boundary on another value.

    Args:
        start: value at count 0.
        changes: from the count of a change to the value from there on.

    Raises:
        ValueError: if a value is not finite or a boundary is not a positive int.

    Example:
        >>> schedule = piecewise(1.0, {10: 0.1, 20: 0.01})
        >>> [float(schedule(torch.tensor(n))) for n in (9, 10, 25)]
        [1.0, 0.1, 0.01]
    """
    _finite(start=start, **{f"changes[{boundary}]": value for boundary, value in changes.items()})
    _steps(**{f"boundary {boundary}": boundary for boundary in changes})
    ordered = sorted(changes.items())
    return _Piecewise(tuple(n for n, _ in ordered), (start, *(value for _, value in ordered)))
