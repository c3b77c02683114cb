"""Faults: numbers that no step can use, found in the graph and raised outside of it.

A step cannot raise on a value without waiting for it, so it reports a 0-d code in ``metrics["fault"]`` and leaves the
state as it was; where reading the code costs nothing (the CPU) the call raises.
"""

from __future__ import annotations

from torch import Tensor

from ..state.errors import NumericsError

__all__ = ["RATE", "WEIGHT", "raise_fault"]

WEIGHT = 1
RATE = 2

_WORDS = {
    WEIGHT: "a weight is negative, not finite or too small to divide by (their sum is {weight})",
    RATE: "a hyperparameter is not finite or out of its range (lr = {lr}, or another): look at its schedule at this count",
}


def raise_fault(metrics: dict[str, Tensor]) -> None:
    """Raise if ``metrics["fault"]`` is nonzero. Reads one value.

    Raises:
        NumericsError: saying which number was unusable.
    """
    code = int(metrics["fault"])
    if code:
        values = {name: float(metrics[name]) if name in metrics else "unknown" for name in ("weight", "lr")}
        words = "; ".join(text.format(**values) for bit, text in _WORDS.items() if code & bit)
        raise NumericsError(f"{words}. Nothing was changed: the state before the call still stands")
