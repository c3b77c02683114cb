"""Timing in turns: what disturbs the machine for a while disturbs every contestant alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer

__all__ = ["in_turns"]


def in_turns(contestants: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float) -> dict[str, Measurement]:
    """Measure each in ``rounds`` turns; a turn repeats it for at least ``seconds``.

    Args:
        contestants: functions of no argument, by name; each has run before.
        rounds: how many turns each has.
        seconds: length of a turn.

    Returns:
        A measurement per name, its times per call.
    """
    timers = {name: _timer(name, call) for name, call in contestants.items()}
    counts = {name: max(1, round(seconds / timer.timeit(2).mean)) for name, timer in timers.items()}
    found: dict[str, list[Measurement]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer.timeit(counts[name]))
    return {name: Measurement.merge(parts)[0] for name, parts in found.items()}


def _timer(name: str, call: Callable[[], Any]) -> Timer:
    def run() -> None:
        ready = getattr(call(), "block_until_ready", None)
        if ready is not None:  # JAX hands results out before they are there
            ready()

    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads(), label="step", description=name)
