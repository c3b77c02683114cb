"""The same inputs give the same bits: run again, in another process, and resumed from any boundary between calls."""

from __future__ import annotations

import functools
import io
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch

from ...state.record import TrainState, copy_state
from ...state.tree import leaves_with_paths
from ..compose import Step
from ..jit import jit
from ..jitted import Jitted
from .difference import result_difference
from .digest import digests
from .explain import explain_difference
from .failure import PropertyError, for_each, plain_step, undonated
from .world import disturb

__all__ = ["assert_deterministic", "assert_resumable"]

_HINT = "look for a generator of your own, an operation without a deterministic form, or a value kept between calls"


def assert_deterministic(
    step: Step | Jitted,
    state: Any,
    batch: Any,
    *,
    runs: int = 3,
    threads: Sequence[int] = (),
    processes: int = 0,
    examples: int = 20,
) -> None:
    """Assert that a step repeats to the bit while everything that must not matter is disturbed.

    Between runs the global generators are seeded anew and freed memory is filled with NaN.

    Args:
        step: from ``compose``, or compiled (without donation).
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        runs: how often it is run in this process.
        threads: thread counts that must all give the same bits; the present setting alone by default, for sums of many
            elements depend on it.
        processes: in how many other processes it is run as well (by fork; eagerly and with one thread).
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the concern and the first differing element.
        TypeError: if ``threads`` is a number.
        ValueError: if there is nothing to compare with.
    """
    if runs < 1 or (runs < _TWO and len(threads) < _TWO and not processes):
        raise ValueError(f"runs must be at least 2, got {runs}: one run has nothing to be compared with")
    if isinstance(threads, int):
        raise TypeError(f"threads must be thread counts such as (1, 2), got {threads!r}")
    step = undonated(step)
    for_each(lambda s, b: _repeats(step, s, b, runs, threads), state, batch, examples=examples)
    if processes:
        for_each(lambda s, b: _other_processes(step, s, b, processes), state, batch, examples=1)


_TWO = 2


def _repeats(step: Step | Jitted, state: TrainState, batch: Any, runs: int, threads: Sequence[int]) -> None:
    kept, setting = copy_state(state), torch.get_num_threads()
    expected: Any = None
    plan = [count for count in (threads or [setting]) for _ in range(runs)]
    try:
        for number, count in enumerate(plan):
            torch.set_num_threads(count)
            disturb(number, state)
            result = step(kept, batch)
            expected = result if expected is None else expected
            found = result_difference(expected, result)
            if found is None:
                continue
            other = f" with {count} threads instead of {plan[0]}" if count != plan[0] else ""
            raise PropertyError(
                "deterministic",
                f"run {number + 1} gave other bits than the first{other}",
                concern=functools.partial(_where, step, kept, batch, (plan[0], count)),
                difference=found,
                hint=_HINT,
            )
    finally:
        torch.set_num_threads(setting)


def _where(step: Step | Jitted, state: TrainState, batch: Any, threads: tuple[int, int]) -> str | None:
    """The concern and the operation where two runs part, the second one with another number of threads."""
    setting = torch.get_num_threads()
    torch.set_num_threads(threads[0])
    try:
        where = explain_difference(step, state, batch, between=functools.partial(torch.set_num_threads, threads[1]))
    finally:
        torch.set_num_threads(setting)
    if where is None:
        return None
    return where.concern + (f", in {where.operation}" if where.operation else "")


def _other_processes(step: Step | Jitted, state: TrainState, batch: Any, processes: int) -> None:
    plain = plain_step(step)
    setting = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = digests(plain(state, batch))
        context = multiprocessing.get_context("fork")
        for number in range(processes):
            reader, writer = context.Pipe(duplex=False)
            child = context.Process(target=_in_child, args=(writer, plain, state, batch, number))
            child.start()
            writer.close()  # so that the end of the child is seen as the end of what it sends
            try:
                found = reader.recv()
            except EOFError:
                child.join()
                found = f"it ended with code {child.exitcode}"
            child.join()
            if isinstance(found, str):
                raise PropertyError("deterministic", f"another process could not run the step: {found}")
            wrong = [path for path in expected if found.get(path) != expected[path]]
            if wrong:
                raise PropertyError(
                    "deterministic", f"another process gave other bits, first in {wrong[0]}", hint=_HINT
                )
    finally:
        torch.set_num_threads(setting)


def _in_child(writer: Any, step: Step, state: TrainState, batch: Any, number: int) -> None:
    torch.set_num_threads(1)
    disturb(1000 + number, state)
    try:
        writer.send(digests(step(state, batch)))
    except Exception as error:
        writer.send(f"{type(error).__name__}: {error}")
    writer.close()


def assert_resumable(step: Step | Jitted, state: Any, batches: Any, *, examples: int = 10) -> None:
    """Assert that a run that was cut at any boundary between calls ends with the bits of the run that was not.

    Each cut sends the state through its serialised form; a compiled step is compiled anew.

    Args:
        step: from ``compose``, or compiled.
        state: a state, or a hypothesis strategy for states.
        batches: the batches of the run, at least two; or a strategy for lists of batches.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the cut and the first differing element.
    """
    for_each(lambda s, b: _resumable(step, s, b), state, batches, examples=examples)


def _resumable(step: Step | Jitted, state: TrainState, batches: Sequence[Any]) -> None:
    if not isinstance(batches, (list, tuple)) or len(batches) < _TWO:
        raise ValueError("batches must be a list of at least two batches: a run is cut between two calls")
    whole, ends = _run(_anew(step), copy_state(state), batches), list[TrainState]()
    current, run = copy_state(state), _anew(step)
    for batch in batches:
        current, _ = run(current, batch)
        ends.append(copy_state(current))
    for cut in range(1, len(batches)):
        resumed = _run(_anew(step), _through_bytes(ends[cut - 1]), batches[cut:])
        found = result_difference(whole, resumed)
        if found is not None:
            raise PropertyError(
                "resumable",
                f"a run cut after {cut} of {len(batches)} calls ends differently",
                difference=found,
                hint="something outside the state decides: a counter, a list or a generator that the loss or an optimizer "
                "closes over; keep it in a slot",
            )


def _anew(step: Step | Jitted) -> Any:
    return (
        jit(step.step, device=step.device, donate=step.donate, backend=step.backend)
        if isinstance(step, Jitted)
        else step
    )


def _run(step: Any, state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, Any]:
    metrics: Any = {}
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def _through_bytes(state: TrainState) -> TrainState:
    """The state as it comes back from a file."""
    from ...state.tree import flatten, unflatten

    values, treedef = flatten(state)
    names = [path for path, _ in leaves_with_paths(state, "state")]
    file = io.BytesIO()
    torch.save(dict(zip(names, values, strict=True)), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return unflatten(treedef, [loaded[name] for name in names])  # type: ignore[no-any-return]
