"""The loss window: a ring buffer of the last values of a number, as a pure record."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from .records import set_fields
from .tree import register

__all__ = ["RunningWindow"]


@attrs.frozen(init=False, eq=False, slots=False)
class RunningWindow:
    """The last ``length`` values appended to it; every method returns a new value or a new record.

    Attributes:
        values: float tensor of shape (length,); places not yet written hold zero.
        count: 0-d int64, how many values were ever appended.

    Example:
        >>> window = RunningWindow.empty(3)
        >>> for value in (1.0, 2.0, 3.0, 4.0):
        ...     window = window.append(torch.tensor(value))
        >>> float(window.mean()), float(window.last()), float(window.min()), float(window.max())
        (3.0, 4.0, 2.0, 4.0)
    """

    values: Tensor
    count: Tensor

    def __init__(self, values: Tensor, count: Tensor) -> None:
        set_fields(self, values=values, count=count)

    @classmethod
    def empty(
        cls, length: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> RunningWindow:
        """A window that holds nothing yet.

        Args:
            length: how many values it remembers, at least 1.
            dtype: of the values, floating.
            device: where it lives; the CPU by default.

        Raises:
            ValueError: if ``length`` is not a positive int, or ``dtype`` is not floating.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"length must be at least 1, got {length!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating, got {dtype}")
        where = device or "cpu"
        return cls(torch.zeros(length, dtype=dtype, device=where), torch.zeros((), dtype=torch.int64, device=where))

    @property
    def length(self) -> int:
        """How many values it remembers."""
        return self.values.shape[0]

    def append(self, value: Tensor) -> RunningWindow:
        """With ``value`` (0-d; detached) written over the oldest one.

        Raises:
            ValueError: if ``value`` is not 0-d.
        """
        if value.dim():
            raise ValueError(f"value must be 0-d, got shape {tuple(value.shape)}")
        place = torch.arange(self.length, device=self.values.device) == self.count % self.length
        return RunningWindow(torch.where(place, value.detach().to(self.values.dtype), self.values), self.count + 1)

    def mean(self) -> Tensor:
        """Mean over the values present; NaN while there are none."""
        return self._present(0.0).sum() / self.count.clamp(max=self.length)

    def last(self) -> Tensor:
        """The newest value; NaN while there is none."""
        place = torch.arange(self.length, device=self.values.device) == (self.count - 1) % self.length
        return self._or_nan(torch.where(place, self.values, 0.0).sum())

    def min(self) -> Tensor:
        """The smallest value present; NaN while there is none."""
        return self._or_nan(self._present(float("inf")).min())

    def max(self) -> Tensor:
        """The largest value present; NaN while there is none."""
        return self._or_nan(self._present(float("-inf")).max())

    def reset(self) -> RunningWindow:
        """A window of the same length that holds nothing."""
        return RunningWindow(torch.zeros_like(self.values), torch.zeros_like(self.count))

    def _present(self, absent: float) -> Tensor:
        written = torch.arange(self.length, device=self.values.device) < self.count
        return torch.where(written, self.values, absent)

    def _or_nan(self, value: Tensor) -> Tensor:
        return torch.where(self.count > 0, value, float("nan"))


register(RunningWindow)
