"""Several whole steps in one call: n batches in, n rows of metrics out, in the manner of ``lax.scan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.errors import BatchError, NumericsError
from ..state.record import TrainState
from .compose import Step

__all__ = ["ScanSteps", "refuse_other_count", "scan_steps", "stopped_at"]

Metrics = dict[str, Tensor]


def scan_steps(step: Step, count: int) -> ScanSteps:
    """Several steps as one function: ``(state, [batch, ...]) -> (state, metrics)``, metrics with a row per step.

    The state is that of ``count`` calls of the step, to the bit. Compiled by ``ps.jit``, the steps follow each other with
    the checks of one call around them all; the graph is that of one step, so that compiling takes no longer.

    Args:
        step: from ``compose``.
        count: how many batches a call takes, at least 1.

    Raises:
        TypeError: if ``step`` is not composed.
        ValueError: if ``count`` is not a positive int.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        >>> many = ps.scan_steps(step, 2)
        >>> state, metrics = many(ps.init(torch.tensor(0.0), step, seed=0), [torch.tensor([1.0]), torch.tensor([3.0])])
        >>> float(state.params), metrics["grad_norm"].tolist()
        (-4.0, [1.0, 3.0])
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must come from ps.compose, got {type(step).__name__}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a positive int, got {count!r}")
    return ScanSteps(step, count)


@attrs.frozen(eq=False)
class ScanSteps:
    """Several steps in one call; see :func:`scan_steps`.

    Attributes:
        step: the step.
        count: how many batches a call takes.
    """

    step: Step
    count: int

    def __call__(self, state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, Metrics]:
        """The steps one after the other, eagerly.

        Raises:
            BatchError: if ``batches`` is not a list of ``count`` batches.
            NumericsError: if a weight or a rate is not a usable number; its ``state`` is that of the steps before.
        """
        refuse_other_count(batches, self.count)
        done: list[Metrics] = []
        for batch in batches:
            try:
                state, metrics = self.step(state, batch)
            except NumericsError as error:
                raise stopped_at(len(done), self.count, error, state) from error
            done.append(metrics)
        return state, {name: torch.stack([row[name] for row in done]) for name in done[0]}


def refuse_other_count(batches: Any, count: int) -> None:
    """Refuse anything but a list of so many batches.

    Raises:
        BatchError: saying how many there are.
    """
    if not isinstance(batches, (list, tuple)):
        raise BatchError(f"batches must be a list of {count} batches, got {type(batches).__name__}")
    if len(batches) != count:
        raise BatchError(f"batches must be {count}, as scan_steps was told, got {len(batches)}")


def stopped_at(done: int, count: int, error: NumericsError, state: TrainState) -> NumericsError:
    """The error of one of several steps, with the state of those before it."""
    words = str(error).partition(". Nothing was changed")[0]
    stopped = NumericsError(
        f"step {done} of {count}: {words}. It changed nothing; error.state holds the state of the {done} before it"
    )
    stopped.state = state
    return stopped
