"""All properties of one step, as a table: what holds, what does not and why, what could not be asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from ...state.errors import NumericsError, PurestepError, PurityError, RandomOpError, StateError
from ...state.record import TrainState, copy_state
from ...state.tree import as_tensors
from ...steps.split_batch import rows
from ..compose import Step
from ..device import Device
from ..jitted import Jitted
from ..program import Backend
from . import compiled, gradients, keyed, purity, repeat, spread
from .failure import NotAskedError, PropertyError, plain_step

__all__ = ["Report", "Result", "check"]


@attrs.frozen
class Result:
    """One row.

    Attributes:
        name: of the property.
        verdict: ``"holds"``, ``"fails"`` or ``"not asked"``.
        why: what was found, or why it could not be asked.
        hint: what to do.
        seconds: how long it took.
    """

    name: str
    verdict: str
    why: str = ""
    hint: str = ""
    seconds: float = 0.0


@attrs.frozen
class Report:
    """The results in order.

    Attributes:
        results: one per property.
    """

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing fails, and something holds."""
        verdicts = {result.verdict for result in self.results}
        return "fails" not in verdicts and "holds" in verdicts

    def __str__(self) -> str:
        width = max(len(result.name) for result in self.results)
        return "\n".join(f"{r.name:<{width}}  {r.verdict:<9}  {r.why}".rstrip() for r in self.results)


def check(
    step: Step | Jitted,
    state: TrainState,
    batch: Any,
    *,
    batches: Sequence[Any] = (),
    device: Device | None = None,
    backends: Sequence[Backend] = ("aot_eager",),
    only: Sequence[str] = (),
) -> Report:
    """Ask every property of a step.

    Args:
        step: from ``compose``, or compiled: then its step, device and backend are asked as well.
        state: a state; it is copied.
        batch: a batch.
        batches: more batches of the same form, for the properties of a run; ``batch`` four times by default.
        device: where a step from ``compose`` is compiled for; without it what is compiled is not asked.
        backends: what compiled forms are compared with the eager one.
        only: names of properties; all by default.

    Returns:
        A report, which prints as a table.

    Raises:
        TypeError: if the step or the state is none, or a name stands where a list of names is needed.
        ValueError: naming a property that does not exist.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        >>> state = ps.init(torch.tensor(0.0), step)
        >>> report = ps.properties.check(step, state, torch.ones(2), only=["pure", "deterministic"])
        >>> print(report)
        pure           holds
        deterministic  holds
    """
    plain, batch = plain_step(step), as_tensors(batch)
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, got {type(state).__name__}")
    where = step.device if isinstance(step, Jitted) else device
    every = tuple(dict.fromkeys([*backends, *([step.backend] if isinstance(step, Jitted) else [])]))
    run = list(batches) or [batch] * 4
    questions: dict[str, Callable[[], None]] = {
        "pure": lambda: purity.assert_pure(plain, state, batch),
        "drawn from the key": lambda: keyed.assert_key_used(plain, state, batch),
        "deterministic": lambda: repeat.assert_deterministic(plain, state, batch),
        "free of leaks": lambda: purity.assert_no_leak(plain, state, batch),
        "stable in its form": lambda: compiled.assert_spec_stable(plain, state, batch),
        "right in its gradients": lambda: gradients.assert_gradients(plain, state, batch),
        "cut invariant": lambda: spread.assert_cut_invariant(plain, state, batch, counts=_counts(batch)),
        "spread invariant": lambda: spread.assert_spread_invariant(plain, state, batch),
        "resumable": lambda: repeat.assert_resumable(plain, state, run),
        "compiled once": lambda: compiled.assert_compiles_once(plain, state, run, device=where, backend=every[0]),
    }
    for backend in every:
        questions[f"equal eager and compiled ({backend})"] = lambda backend=backend: (
            compiled.assert_compiled_matches_eager(
                plain, state, batch, device=where, backend=backend, ulps=_ULPS if backend == "inductor" else 0, steps=1
            )
        )  # type: ignore[misc] # a default binds the loop's value
    if isinstance(only, str) or isinstance(backends, str):
        raise TypeError(f"only and backends must be lists of names, got {only!r} and {backends!r}")
    unknown = [name for name in only if name not in questions]
    if unknown:
        raise ValueError(f"there is no property {unknown[0]!r}; there are {', '.join(questions)}")
    broken = _runs(plain, state, batch)
    if broken is not None:
        return Report((broken,))
    asked = {name: question for name, question in questions.items() if not only or name in only}
    return Report(tuple(_in_turn(asked)))


def _runs(step: Step, state: TrainState, batch: Any) -> Result | None:
    """A row of its own for a step that does not run: nothing else can be asked then."""
    try:
        step(copy_state(state), batch)
    except (NumericsError, PurityError, RandomOpError, StateError):
        return None  # a property of its own says more
    except Exception as error:  # whatever the user's code raises
        return Result("runs", "fails", f"{type(error).__name__}: {error}", "make the eager step run first")
    return None


def _in_turn(questions: dict[str, Callable[[], None]]) -> Iterator[Result]:
    """The results; a step that does not repeat itself is not asked what compares two runs."""
    repeats = True
    for name, question in questions.items():
        if not repeats and name not in _ALWAYS:
            yield Result(name, "not asked", "the step is not deterministic")
            continue
        result = _ask(name, question)
        repeats = repeats and not (name == "deterministic" and result.verdict == "fails")
        yield result


_ALWAYS = ("pure", "drawn from the key", "deterministic", "free of leaks", "stable in its form", "compiled once")
_ULPS = 2**10  # a relative distance of 1.2e-4 in float32, after one step of fused kernels
_COUNTS = 4


def _counts(batch: Any) -> tuple[int, ...]:
    return tuple(range(1, max(2, min(_COUNTS, rows(batch))) + 1))


def _ask(name: str, question: Callable[[], None]) -> Result:
    start = time.perf_counter()
    try:
        question()
    except PropertyError as error:
        return Result(name, "fails", error.found, error.hint, time.perf_counter() - start)
    except NotAskedError as error:
        return Result(name, "not asked", str(error), "", time.perf_counter() - start)
    except PurestepError as error:
        return Result(name, "not asked", f"the step is refused: {error}", "", time.perf_counter() - start)
    except Exception as error:  # a step that raises fails the property; the rest is asked all the same
        return Result(name, "fails", f"{type(error).__name__}: {error}", "", time.perf_counter() - start)
    return Result(name, "holds", "", "", time.perf_counter() - start)
