"""The errors of purestep: each says what was wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchError",
    "CompileError",
    "ComposeError",
    "DonatedError",
    "LossError",
    "NumericsError",
    "PurestepError",
    "PurityError",
    "RandomOpError",
    "StateError",
    "TraceError",
]


class PurestepError(Exception):
    """Base of every error that purestep raises on purpose."""


class ComposeError(PurestepError, ValueError):
    """The concerns given to ``compose`` do not fit together."""


class StateError(PurestepError, ValueError):
    """A state lacks a slot, has a foreign leaf, or does not fit the step."""


class DonatedError(PurestepError, RuntimeError):
    """A donated state was used again, or was lost inside a donated call."""


class BatchError(PurestepError, ValueError):
    """A batch cannot be split or does not fit the state."""


class LossError(PurestepError, ValueError):
    """A loss function returned something that cannot be summed and differentiated."""


class NumericsError(PurestepError, ArithmeticError):
    """A weight or a rate is not a usable number; the state was left as it was.

    Attributes:
        state: where several steps ran in one call, the state after those before the one that failed.
    """

    state: Any = None


class PurityError(PurestepError, RuntimeError):
    """A function wrote into something it was given, or a module kept something that a state cannot hold."""


class RandomOpError(PurestepError, RuntimeError):
    """A random operation cannot be drawn from the step's key."""


class TraceError(PurestepError, RuntimeError):
    """The step cannot be traced into one graph."""


class CompileError(PurestepError, RuntimeError):
    """A traced step could not be compiled or its compiled form could not be loaded."""
