"""Where the time of a step goes, by concern: measured on the eager step, before anything is fused."""

from __future__ import annotations

from typing import Any

from ...state.record import TrainState
from ...steps.scope import PREFIX, scope
from ..compose import Step
from .profiler import profiled

__all__ = ["shares"]


def shares(step: Step, state: TrainState, batch: Any, *, repeats: int = 5) -> dict[str, float]:
    """The share of each concern in the time of an eager step, and ``"the rest"``; they add up to 1.

    The share of ``backward`` is without the forward inside of it, that of ``accumulate`` without both.
    """

    def run() -> None:
        for _ in range(repeats):
            with scope("the rest"):
                step(state, batch)

    step(state, batch)
    times: dict[str, float] = {}
    for event in profiled(run).events():  # type: ignore[no-untyped-call] # torch's method is not annotated
        if event.name.startswith(PREFIX):
            own = event.cpu_time_total - sum(inner.cpu_time_total for inner in _inside(event))
            name = event.name.removeprefix(PREFIX)
            times[name] = times.get(name, 0.0) + own
    whole = sum(times.values())
    return {name: time / whole for name, time in sorted(times.items(), key=lambda item: -item[1])}


def _inside(event: Any) -> list[Any]:
    """The nearest scopes of ours within one."""
    found = []
    for child in event.cpu_children:
        found += [child] if child.name.startswith(PREFIX) else _inside(child)
    return found
