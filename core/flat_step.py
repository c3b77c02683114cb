"""A step over flat tensors: what is traced, and how its inputs and outputs map to states and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.errors import StateError
from ..state.record import FlatState, TrainState
from ..state.spec import difference
from ..state.torch_private import storage_of
from ..state.tree import TreeDef, flatten, unflatten

__all__ = ["FlatStep", "Outputs", "flat_step"]

Run = Callable[[TrainState, Any], tuple[TrainState, dict[str, Tensor]]]


@attrs.define(slots=False)
class Outputs:
    """What the traced function found out about its outputs.

    Attributes:
        changed: indices of the state's leaves that the step computes anew; the others are handed on.
        metrics: names, in the order of the outputs after the changed leaves.
    """

    changed: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()

    @functools.cached_property
    def fault(self) -> int:
        """Where among the metrics the code of a fault stands."""
        return self.metrics.index("fault")


@attrs.frozen
class FlatStep:
    """A function from flat tensors to flat tensors, and the record of its outputs, filled when it runs."""

    fn: Callable[..., tuple[Tensor, ...]]
    outputs: Outputs


def flat_step(run: Run, state: FlatState, batch: tuple[list[Any], TreeDef], *, donate: bool) -> FlatStep:
    """The step as ``fn(*state leaves, *batch tensors) -> (changed leaves, metrics)``.

    With ``donate`` the changed leaves are written into the old ones at the very end, and only metrics are returned.

    Args:
        run: the step without checks.
        state: leaves (for their number) and structure.
        batch: leaves and structure; leaves that are not tensors are constants.
        donate: whether the old leaves are given up.

    Raises:
        StateError: from ``fn``, if the step changed the form of the state.
    """
    outputs = Outputs()
    count = len(state.leaves)
    static, treedef = batch

    def fn(*flat: Tensor) -> tuple[Tensor, ...]:
        old = flat[:count]
        tensors = iter(flat[count:])
        whole = treedef.unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in static])
        before = unflatten(state.treedef, old)
        after, metrics = run(before, whole)
        new, after_def = flatten(after)
        if after_def != state.treedef or difference(list(old), list(new)) is not None:
            raise StateError(
                "the step changed the form of the state, which must stay over a step: "
                f"{difference(before, after, 'state')}"
            )
        outputs.changed = tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b)
        outputs.metrics = tuple(metrics)
        fresh = [_laid_out(_apart(new[i], flat), old[i]) for i in outputs.changed]
        measured = [_apart(value, flat) for value in metrics.values()]
        if not donate:
            return (*fresh, *measured)
        for i, value in zip(outputs.changed, fresh, strict=True):
            old[i].copy_(value)
        return tuple(measured)

    return FlatStep(fn, outputs)


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """The value with the strides of the leaf that it follows: a compiled step is compiled for them."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(value)


def _apart(value: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """The value in storage of its own: an output that shares one with an input would change with the next donation."""
    own = storage_of(value)
    return value.clone() if any(own == storage_of(given) for given in inputs) else value
