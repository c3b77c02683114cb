"""Gradients against finite differences, in float64, with every draw held fixed by the key."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...state.distributions import normal
from ...state.key import fold_in, random_key
from ...state.record import TrainState
from ...state.sums import Sums
from ...state.tree import flatten, map_leaves, unflatten
from ..compose import Step
from ..jitted import Jitted
from ..phase import Phase
from .failure import NotAskedError, PropertyError, for_each, plain_step
from .spread import cut_invariant, draws, settled

__all__ = ["assert_gradients"]


def assert_gradients(
    step: Step | Jitted, state: Any, batch: Any, *, tolerance: float = 1e-5, step_size: float = 1e-5, examples: int = 5
) -> None:
    r"""Assert that the gradients are those of the loss: against central differences along a random direction per leaf.

    The gradients are also compared with those of the undivided batch, as in :func:`assert_cut_invariant`, unless the loss
    draws from its key itself.

    :math:`\langle \nabla L, v \rangle \approx (L(\theta + h v) - L(\theta - h v)) / 2h` with all floating tensors in
    float64. Functions of the user's own on the ``Sums`` (before ``accumulate``) are part of what is compared.

    Args:
        step: from ``compose``, or compiled: then its step is meant.
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        tolerance: the largest difference, relative to the larger of both and at least 1e-3 of the gradient's norm.
        step_size: the largest h, relative to the leaf's size; smaller ones are tried after it, down to a thousandth, for
            where a step crosses the kink of a ReLU the difference is none of a derivative.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the leaf, both values, and whether the gradient is absent.
        NotAskedError: if the loss does not run in float64, or has no finite value. A loss that casts to a coarser dtype is
            compared with larger steps, to 3 %.

    Reference:
        Nocedal, Wright: Numerical Optimization, chapter 8.
    """
    plain = plain_step(step)
    for_each(lambda s, b: _gradients(plain, s, b, tolerance, step_size), state, batch, examples=examples)


def _gradients(step: Step, state: TrainState, batch: Any, tolerance: float, step_size: float) -> None:
    wide, rows = map_leaves(_double, state), map_leaves(_double, batch)
    for phase in step.phases:
        with _float64_default():
            sums = _in_float64(phase, wide, rows)
            if sums.loss.dtype != torch.float64:  # the loss computes in a coarser dtype whatever the params are
                tolerance, step_size = max(tolerance, _COARSE), max(step_size, _COARSE)
            elif phase.split is not None and not draws(settled(phase), wide, rows):
                cut_invariant(settled(phase), wide, rows, (1, len(phase.split(rows))), 1e-9, "right in its gradients")
            _along_directions(phase, wide, rows, phase.accumulate.divide(sums), tolerance, step_size)


_COARSE = 3e-2


@contextlib.contextmanager
def _float64_default() -> Iterator[None]:
    """Tensors that a loss makes of numbers are float64 as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_float64(phase: Phase, state: TrainState, batch: Any) -> Sums:
    try:
        sums = phase.local(state, batch)
    except RuntimeError as error:
        raise NotAskedError(
            f"the loss does not run in float64, where gradients are compared ({str(error).splitlines()[0]}); make what it "
            "adds in the dtype of the params"
        ) from error
    if not bool(torch.isfinite(sums.loss)) or not bool(sums.weight > 0):
        raise NotAskedError(
            f"the loss is {float(sums.loss)} over a weight of {float(sums.weight)}: no slope to compare"
        )
    return sums


def _along_directions(
    phase: Phase, wide: TrainState, rows: Any, grads: Any, tolerance: float, step_size: float
) -> None:
    norm = math.sqrt(sum(float(leaf.abs().square().sum()) for leaf in flatten(grads)[0]))
    values, treedef = flatten(wide.params)
    given = flatten(grads, none_is_leaf=True)[0]
    for index, (leaf, grad) in enumerate(zip(values, given, strict=True)):
        trainable = phase.forward.is_trainable(treedef.paths()[index], leaf)
        if not trainable or not leaf.numel():
            continue
        path = treedef.accessors()[index].codify("params")
        direction = normal(fold_in(random_key(0), index), leaf.shape, dtype=leaf.dtype)
        found = 0.0 if grad is None else _inner(grad, direction)
        slope = 0.0
        for h in _steps(leaf, step_size):
            slope = _slope(phase, wide, rows, treedef, values, index, direction, h)
            if abs(slope - found) <= tolerance * max(abs(slope), abs(found), 1e-3 * norm, 1e-12):
                break
        else:
            absent = " (the leaf has no gradient)" if grad is None else ""
            raise PropertyError(
                "right in its gradients",
                f"along a random direction of {path} the loss rises by {slope:.8g}, the gradient says {found:.8g}"
                f"{absent}",
                concern="backward",
                hint="look for a detach, a no_grad, a custom backward, or a function that changes the sums",
            )


def _steps(leaf: Tensor, step_size: float) -> list[float]:
    scale = max(1.0, float(leaf.abs().max())) / max(1.0, math.sqrt(leaf.numel()))
    return [step_size * scale * 10.0**-power for power in range(4)]


def _inner(grad: Tensor, direction: Tensor) -> float:
    return float((grad.conj() * direction).real.sum() if grad.is_complex() else (grad * direction).sum())


def _slope(
    phase: Phase,
    state: TrainState,
    batch: Any,
    treedef: Any,
    values: list[Tensor],
    index: int,
    direction: Tensor,
    h: float,
) -> float:
    losses = []
    for sign in (1.0, -1.0):
        moved = [leaf + sign * h * direction if place == index else leaf for place, leaf in enumerate(values)]
        losses.append(_loss(phase, state.replace(params=unflatten(treedef, moved)), batch))
    return (losses[0] - losses[1]) / (2.0 * h)


def _loss(phase: Phase, state: TrainState, batch: Any) -> float:
    sums = phase.local(state, batch)
    return float(sums.loss) / float(sums.weight)


def _double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    wide = torch.complex128 if leaf.is_complex() else torch.float64
    return leaf.to(wide) if leaf.is_complex() or leaf.is_floating_point() else leaf
