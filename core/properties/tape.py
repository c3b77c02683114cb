"""A step that also reports what flows between its concerns: the same graph with more outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from ...state.record import TrainState
from ...state.sums import Loss
from ...state.tree import leaves_with_paths
from ...steps.accumulate import Accumulate
from ...steps.concern import Custom
from ..compose import Step
from ..device import Device
from ..phase import Phase

__all__ = ["TAP", "concern_of", "tapped"]

TAP = "tap "
_ALL = 2**31  # microbatches: none of them goes into a loop, where nothing can be reported


@attrs.frozen(eq=False)
class TappedStep(Step):
    """A step whose metrics hold every leaf that flowed, in order, by ``tap <number> <concern> <path>``."""

    tape: list[tuple[str, Any]] = attrs.field(factory=list)

    def run(self, state: TrainState, batch: Any, device: Device | None = None) -> tuple[TrainState, dict[str, Tensor]]:
        """The step, with its tape among the metrics."""
        self.tape.clear()
        new, metrics = Step.run(self, state, batch, device)
        found: dict[str, Tensor] = {}
        for number, (concern, value) in enumerate(self.tape):
            for path, leaf in leaves_with_paths(value, ""):
                if isinstance(leaf, Tensor):
                    found[f"{TAP}{number:06d} {concern}\n{path}"] = leaf.detach().clone()
        self.tape.clear()
        return new, {**found, **metrics}


def tapped(step: Step) -> TappedStep:
    """The step with a tap after each concern; keys and bits of what it computes stay."""
    tape: list[tuple[str, Any]] = []
    phases = tuple(_tapped_phase(phase, tape) for phase in step.phases)
    return TappedStep(step.concerns, phases, tape)


def concern_of(metric: str) -> tuple[str, str]:
    """The concern and the leaf's path of a tap's name."""
    concern, _, path = metric[len(TAP) + 7 :].partition("\n")
    return concern, path


def _tapped_phase(phase: Phase, tape: list[tuple[str, Any]]) -> Phase:
    def tap(name: str, kind: str) -> Custom:
        return Custom(_recorder(tape, name, kind), kind, place=-1)

    def after_each(functions: tuple[Custom, ...], kind: str) -> tuple[Custom, ...]:
        return tuple(made for fn in functions for made in (fn, tap(fn.name, kind)))

    split = () if phase.split is None else (tap("split_batch", "microbatch"),)
    later: list[Any] = [tap("accumulate", "grads")]
    for concern in phase.after:
        later += [concern, tap(_name(concern), concern.gives)]
    accumulate: Accumulate = attrs.evolve(phase.accumulate, unroll=_ALL)
    return attrs.evolve(
        phase,
        batch=after_each(phase.batch, "batch"),
        microbatch=(*split, *after_each(phase.microbatch, "microbatch")),
        loss=(tap("forward", "loss"), *after_each(phase.loss, "loss")),
        sums=(tap("backward", "sums"), *after_each(phase.sums, "sums")),
        accumulate=accumulate,
        after=tuple(later),
    )


def _name(concern: Any) -> str:
    return concern.name if isinstance(concern, Custom) else type(concern).__name__.lower().removesuffix("concern")


def _recorder(tape: list[tuple[str, Any]], name: str, kind: str) -> Callable[[Any], Any]:
    def record(value: Any) -> Any:
        kept = value.replace(total=value.total.detach(), carry=None) if isinstance(value, Loss) else value
        tape.append((name, {kind: kept}))
        return value

    return record
