"""The schedule concern: hyperparameters of the optimizer as functions of the update count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
from torch import Tensor

from ..state.errors import ComposeError
from .concern import Flow, Stateless
from .guard import Guard
from .hyper import Hyper, Range, check_hyper, evaluate
from .random_ops import keyed

__all__ = ["ScheduleConcern", "schedule"]


def schedule(**hyper: Hyper) -> ScheduleConcern:
    """Set hyperparameters of the following ``step`` from the count of updates.

    The same as handing a schedule to the optimizer, for an optimizer that was built elsewhere with plain numbers.

    Args:
        **hyper: by the optimizer's name of it (``lr``, ``weight_decay``, ...): a number, a 0-d tensor or a schedule.

    Returns:
        A concern, to be called as ``count -> {name: 0-d tensor}``.

    Raises:
        ValueError: if nothing is given or a number is not finite.
        ComposeError: when composed, if the optimizer does not know a name or a number is out of its range.

    Example:
        >>> import torch, purestep as ps
        >>> ps.schedule(lr=ps.linear(1.0, 0.0, steps=4))(torch.tensor(1))
        {'lr': tensor(0.7500, dtype=torch.float64)}
    """
    if not hyper:
        raise ValueError("schedule: name at least one hyperparameter, as in ps.schedule(lr=ps.linear(...))")
    return ScheduleConcern(tuple((name, check_hyper(name, value)) for name, value in hyper.items()))


@attrs.frozen
class ScheduleConcern(Stateless):
    """Hyperparameters by name; see :func:`schedule`."""

    takes: ClassVar[str] = "grads"
    gives: ClassVar[str] = "grads"

    hyper: tuple[tuple[str, Hyper], ...]

    def __call__(self, count: Tensor) -> dict[str, Tensor]:
        """The values at a count, 0-d float64."""
        return {name: evaluate(value, count) for name, value in self.hyper}

    def check_for(self, ranges: Mapping[str, Range]) -> None:
        """Refuse what an optimizer with these hyperparameters cannot take.

        Raises:
            ComposeError: naming the hyperparameter.
        """
        for name, value in self.hyper:
            if name not in ranges:
                raise ComposeError(f"schedule: the optimizer has no hyperparameter {name}; it has {', '.join(ranges)}")
            try:
                check_hyper(name, value, ranges[name])
            except ValueError as error:
                raise ComposeError(f"schedule: {error}") from error

    def apply(self, flow: Flow) -> Flow:
        """The flow with the values at the state's count of updates."""
        with keyed(None, Guard(state=flow.state)):
            now = self(flow.state.counters.updates)
        return flow.replace(hyper={**flow.hyper, **now})
