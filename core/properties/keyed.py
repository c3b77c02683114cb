"""All randomness of a step comes from its key, and each update and each microbatch draws anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...state.errors import RandomOpError
from ...state.key import fold_in
from ...state.record import Counters, TrainState, copy_state
from ...state.tree import map_leaves
from ...steps.split_batch import rows
from ..compose import Step
from ..jitted import Jitted
from .difference import first_difference, result_difference
from .explain import explain_difference
from .failure import PropertyError, for_each, plain_step, undonated
from .tape import TAP, concern_of, tapped
from .world import GENERATOR, changed, disturb, world

__all__ = ["assert_key_used"]


def assert_key_used(step: Step | Jitted, state: Any, batch: Any, *, examples: int = 20) -> None:
    """Assert that all randomness comes from the state's key: the global generators do not matter and do not move.

    Args:
        step: from ``compose``, or compiled (without donation).
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the generator that moved, or the leaf that depends on one.
    """
    step = undonated(step)
    for_each(lambda s, b: _key_used(step, s, b), state, batch, examples=examples)


def _key_used(step: Step | Jitted, state: TrainState, batch: Any) -> None:
    plain = plain_step(step)
    kept, results = copy_state(state), []
    for seed in (0, 1, 2):
        disturb(seed)
        before = {name: value for name, value in world(plain).items() if "generator" in name}
        try:
            results.append(step(kept, batch))
        except RandomOpError as error:
            raise PropertyError(_KEYED, str(error), hint=GENERATOR) from error
        moved = changed(before, world(plain))
        if moved is not None:
            raise PropertyError(_KEYED, f"the step draws from {moved}", hint=GENERATOR)
        found = result_difference(results[0], results[-1])
        if found is not None:
            raise PropertyError(
                _KEYED,
                "other seeds of the global generators give other results",
                concern=lambda: _concern(plain, kept, batch),
                difference=found,
                hint=GENERATOR,
            )
    _draws_anew(plain, kept, batch)


def _concern(step: Step, state: TrainState, batch: Any) -> str | None:
    where = explain_difference(step, state, batch, between=lambda: disturb(7))
    return where.concern if where else None


_KEYED = "drawn from the key"


def _draws_anew(step: Step, state: TrainState, batch: Any) -> None:
    """If a step draws at all, then each update and each microbatch draws other numbers."""
    given = _alike(step, batch)
    losses = _losses(step, state, given)
    other = _losses(step, state.replace(key=fold_in(state.key, 1)), given)
    if first_difference(losses, other) is None:
        return  # nothing in it is random
    clock = state.counters
    later = Counters(clock.updates + 1, clock.batches, clock.samples, clock.skips, clock.epochs)
    if first_difference(losses, _losses(step, state.replace(counters=later), given)) is None:
        raise PropertyError(_KEYED, "two updates draw the same numbers", hint="fold the count of updates into the key")
    if len(losses) > 1 and first_difference(losses[0], losses[1]) is None:
        raise PropertyError(_KEYED, "two microbatches draw the same numbers", hint="fold its index into the key")


def _alike(step: Step, batch: Any) -> Any:
    """The batch with the rows of its first microbatch in every microbatch, where they are tensors."""
    split = step.phases[0].split
    if split is None:
        return batch
    parts = split(batch)
    size, total = rows(parts[0]), rows(batch)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.layout != torch.strided or len(leaf) != total:
            return leaf
        return leaf[:size].repeat(len(parts), *[1] * (leaf.dim() - 1))[:total]

    return map_leaves(repeated, batch)


def _losses(step: Step, state: TrainState, batch: Any) -> list[Tensor]:
    """The loss of each microbatch."""
    _, metrics = tapped(step)(state, batch)
    taps = [name for name in metrics if name.startswith(TAP) and concern_of(name)[0] == "forward"]
    return [metrics[name] for name in taps if concern_of(name)[1] == "['loss'].total"]
