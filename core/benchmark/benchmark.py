"""Benchmark: a compiled step against what it is to replace, on the user's own model and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.benchmark import Measurement

from ...state.record import TrainState, copy_state
from ...state.tree import as_tensors, leaves
from ..compose import Step
from ..device import Device
from ..jit import jit
from ..jitted import Jitted
from ..program import Backend
from .measure import in_turns
from .memory import peak_bytes
from .overhead import Emptied
from .report import Row, StepReport
from .shares import shares
from .start import first_steps

__all__ = ["benchmark"]

OURS = "purestep"


def benchmark(
    step: Step | Jitted,
    state: TrainState,
    batch: Any,
    *,
    against: Mapping[str, Callable[[], Any]] | None = None,
    device: Device | None = None,
    backend: Backend = "inductor",
    rounds: int = 9,
    seconds: float = 0.2,
    start: bool = True,
) -> StepReport:
    """Measure a step against other ways to train.

    All take turns in one process, with ``torch.utils.benchmark``; a ratio is that of medians. What a contestant's threads
    do when it is not its turn is not seen: measure libraries with thread pools of their own in processes of their own.

    Args:
        step: from ``compose`` (compiled here, its state donated), or a compiled one.
        state: a state of the step; a copy is trained.
        batch: a batch.
        against: functions of no argument that each train one step their way, by name. The first is the baseline. The
            step itself run eagerly by default.
        device: where the step runs, needed with a step that is not compiled.
        backend: how a step that is not compiled is compiled.
        rounds: how many turns each has, at least 3.
        seconds: how long a turn is.
        start: whether the time to the first step is measured, which compiles the step twice more.

    Returns:
        A report: ``print`` it, ``save`` it as JSON, ``draw`` it.

    Raises:
        TypeError: if ``step`` is no step, or ``against`` holds anything but functions.
        ValueError: if ``device`` is missing, or ``rounds`` or ``seconds`` are too small to say anything.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
        >>> state, cpu = ps.init(torch.tensor(0.0), step), ps.devices.cpu()
        >>> fast = ps.jit(step, device=cpu, backend="aot_eager")
        >>> report = ps.benchmark(fast, state, torch.ones(3), rounds=3, seconds=0.001, start=False)
        >>> [row.name for row in report.rows], report.compiles
        (['purestep', 'the step run eagerly'], 1)
    """
    _check(against, rounds, seconds)
    fast = _compiled(step, device, backend)
    batch = as_tensors(batch)
    ours = _Trained(fast, state, batch)
    others = dict(against) if against is not None else {"the step run eagerly": _Trained(fast.step, state, batch)}
    contestants: dict[str, Callable[[], Any]] = {OURS: ours, **others}
    for call in contestants.values():
        call()
    measured = in_turns(contestants, rounds=rounds, seconds=seconds)
    baseline = measured[next(iter(others))].median
    rows = tuple(_row(name, m, baseline, peak_bytes(contestants[name])) for name, m in measured.items())
    cold, warm = first_steps(fast, state, batch) if start else (None, None)
    return StepReport(
        rows=rows,
        state_bytes=sum(leaf.numel() * leaf.element_size() for leaf in leaves(state)),
        compiles=fast.compiles,
        first_cold=cold,
        first_warm=warm,
        overhead=_overhead(fast, state, batch, rounds, seconds) if fast.backend == "inductor" else None,
        shares=shares(fast.step, state, batch),
    )


def _check(against: Any, rounds: int, seconds: float) -> None:
    if against is not None:
        if not isinstance(against, Mapping) or not against:
            raise TypeError(f"against must map names to functions of no argument, got {against!r}")
        for name, call in against.items():
            if not callable(call) or name == OURS:
                raise TypeError(f"against[{name!r}] must be a function of no argument under another name, got {call!r}")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < _FEWEST:
        raise ValueError(f"rounds must be an int of at least {_FEWEST}, to know a spread, got {rounds!r}")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")


_FEWEST = 3


def _compiled(step: Any, device: Device | None, backend: Backend) -> Jitted:
    if isinstance(step, Jitted):
        return Jitted(step.step, step.device, donate=step.donate, backend=step.backend)
    if not isinstance(step, Step):
        raise TypeError(f"step must come from ps.compose or ps.jit, got {type(step).__name__}")
    if device is None:
        raise ValueError("device is missing: say where the step runs, as in device=ps.devices.cpu()")
    return jit(step, device=device, donate=True, backend=backend)


class _Trained:
    """A call without arguments that trains one step further on a state of its own."""

    def __init__(self, step: Step | Jitted, state: TrainState, batch: Any) -> None:
        self.step, self.state, self.batch = step, copy_state(state), batch

    def __call__(self) -> dict[str, Any]:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def _row(name: str, measured: Measurement, baseline: float, peak: int) -> Row:
    return Row(
        name=name,
        median=measured.median,
        spread=measured.iqr / measured.median,
        ratio=measured.median / baseline,
        peak=peak,
        noisy=not measured.meets_confidence(),
        times=tuple(measured.times),
    )


def _overhead(fast: Jitted, state: TrainState, batch: Any, rounds: int, seconds: float) -> float:
    emptied = _Trained(Emptied(fast.step, fast.device, donate=fast.donate, backend=fast.backend), state, batch)
    emptied()
    return in_turns({"emptied": emptied}, rounds=rounds, seconds=seconds / 4)["emptied"].median
