"""The compiled step: compiled once, equal to the eager one, and of a form that stays."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ...state.errors import PurestepError, TraceError
from ...state.record import TrainState, copy_state
from ...state.spec import difference
from ...state.tree import flatten
from ..compose import Step
from ..device import Device
from ..form import forms
from ..jit import jit
from ..jitted import Jitted
from ..program import Backend
from .difference import result_difference
from .explain import explain_difference
from .failure import NotAskedError, PropertyError, for_each, undonated

__all__ = ["assert_compiled_matches_eager", "assert_compiles_once", "assert_spec_stable"]


def assert_spec_stable(step: Step | Jitted, state: Any, batch: Any, *, steps: int = 2, examples: int = 20) -> None:
    """Assert that structure, shapes, dtypes and devices of the state stay over a step.

    Args:
        step: from ``compose``, or compiled (without donation).
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        steps: how many steps are run.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the leaf and both forms.
    """

    def check(state: TrainState, batch: Any) -> None:
        for _ in range(steps):
            try:
                new, _ = step(state, batch)
            except PurestepError as error:
                raise PropertyError("stable in its form", str(error)) from error
            found = difference(state, new, "state")
            if found is not None:
                raise PropertyError("stable in its form", found, hint="a function must keep shapes and dtypes")
            state = new

    step = undonated(step)
    for_each(check, state, batch, examples=examples)


def assert_compiles_once(
    step: Step | Jitted,
    state: Any,
    batches: Any,
    *,
    device: Device | None = None,
    backend: Backend = "aot_eager",
    examples: int = 3,
) -> None:
    """Assert that one compile serves all of these batches: other content, other steps and rates compile nothing.

    Args:
        step: from ``compose``, or compiled.
        state: a state, or a hypothesis strategy for states.
        batches: batches of one form, or a strategy for lists of such.
        device: where a step from ``compose`` is compiled for.
        backend: with what.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming what made it compile again, or why it cannot be compiled.
        ValueError: if a step from ``compose`` is given without a device.
    """
    if not isinstance(step, Jitted) and device is None:
        raise NotAskedError(_NO_DEVICE)
    for_each(lambda s, b: _compiles_once(_compiled(step, device, backend), s, b), state, batches, examples=examples)


def _compiles_once(fast: Jitted, state: TrainState, batches: Sequence[Any]) -> None:
    state, first = copy_state(state), None
    for number, batch in enumerate(batches):
        before = fast.compiles
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                state, _ = fast(state, batch)
            except TraceError as error:
                raise PropertyError("compiled once", str(error), hint="see what the error says") from error
        first = batch if first is None else first
        if number and fast.compiles > before:
            reason = next((str(warning.message) for warning in said if "Python value" in str(warning.message)), None)
            raise PropertyError(
                "compiled once",
                f"call {number + 1} compiled again: {reason or _other_form(first, batch)}",
                hint="hand in what changes as a tensor, and batches of one form",
            )


_NO_DEVICE = "give the device that the step is compiled for, such as device=ps.devices.cpu()"


def _compiled(step: Step | Jitted, device: Device | None, backend: Backend) -> Jitted:
    if isinstance(step, Jitted):
        return jit(step.step, device=step.device, backend=step.backend, donate=step.donate)
    if device is None:
        raise NotAskedError(_NO_DEVICE)
    return jit(step, device=device, backend=backend)


def _other_form(one: Any, other: Any) -> str:
    found = difference(one, other, "batch")
    if found is not None:
        return found
    (ours, treedef), (theirs, _) = flatten(one), flatten(other)
    for path, a, b in zip(treedef.accessors(), forms(ours), forms(theirs), strict=True):
        if a != b:
            return f"{path.codify('batch')} has another layout: {a} and {b}"
    return "a setting around the step changed (autocast, threads, the default dtype)"


def assert_compiled_matches_eager(
    step: Step | Jitted,
    state: Any,
    batch: Any,
    *,
    device: Device | None = None,
    backend: Backend = "aot_eager",
    ulps: int = 0,
    steps: int = 2,
    examples: int = 5,
) -> None:
    """Assert that a compiled step gives the eager step's numbers.

    Args:
        step: from ``compose``, or compiled: then its backend is meant.
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        device: where a step from ``compose`` is compiled for.
        backend: with what.
        ulps: how far floating numbers may lie apart, in units in the last place of the params' dtype, of the largest
            element of a leaf and its neighbours; 0 for every bit. Inductor rounds otherwise than eager kernels.
        steps: how many steps are run.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the concern and the first differing element.
        ValueError: if a step from ``compose`` is given without a device.
    """
    fast = _compiled(step, device, backend)
    for_each(lambda s, b: _matches(fast, s, b, ulps, steps), state, batch, examples=examples)


def _matches(fast: Jitted, state: TrainState, batch: Any, ulps: int, steps: int) -> None:
    plain, one, other = fast.step, copy_state(state), copy_state(state)
    for number in range(steps):
        before = copy_state(one)
        (one, expected), (other, found) = plain(one, batch), fast(other, batch)
        wrong = result_difference((one, expected), (other, found), ulps=ulps, eps=_unit(one))
        if wrong is not None:
            raise PropertyError(
                f"equal eager and compiled ({fast.backend})",
                f"step {number + 1} differs by more than {ulps} ulp",
                concern=functools.partial(_concern, plain, fast, before, batch),
                difference=wrong,
                hint="a value that changes between calls was frozen into the graph"
                if fast.backend != "inductor"
                else "allow the rounding of fused kernels with ulps=",
            )


def _unit(state: TrainState) -> float:
    """The coarsest rounding unit among the params."""
    floats = [leaf for leaf in flatten(state.params)[0] if leaf.is_floating_point() or leaf.is_complex()]
    return max(float(torch.finfo(leaf.dtype).eps) for leaf in floats)


def _concern(plain: Step, fast: Jitted, state: TrainState, batch: Any) -> str | None:
    where = explain_difference(plain, state, batch, against=fast)
    return where.concern if where else None
