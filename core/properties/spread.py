"""Indifference to how a batch is spread over processes and calls, and to how it is cut into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ...state.record import TrainState
from ...state.sums import Sums
from ...state.tree import Tree, leaves_with_paths
from ...steps.split_batch import SplitBatch, rows, take_rows
from ..compose import Step
from ..jit import Jitted
from ..phase import Phase
from .difference import first_difference, result_difference
from .failure import PropertyError, for_each

__all__ = ["assert_cut_invariant", "assert_spread_invariant"]


def assert_spread_invariant(
    step: Step | Jitted, state: Any, batch: Any, *, ranks: Sequence[int] = (2, 4), examples: int = 20
) -> None:
    """Assert that a step gives the same bits however its microbatches are spread over processes, or over calls.

    Processes are simulated in this one: each runs ``local`` on its aligned share, the sums are added in the tree over
    the processes, and ``apply`` runs once. Calls are the same with one process that counts on.

    Args:
        step: with ``split_batch(K)``; at least one of ``ranks`` must divide K.
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        ranks: numbers of processes, powers of two.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the spread and the first differing element.
        ValueError: if the step has no microbatches that could be spread.
    """
    plain = step.step if isinstance(step, Jitted) else step
    for_each(lambda s, b: _spread(plain, s, b, ranks), state, batch, examples=examples)


def _spread(step: Step, state: TrainState, batch: Any, ranks: Sequence[int]) -> None:
    for phase in step.phases:
        count, size = _microbatches(phase, batch)
        worlds = [world for world in ranks if world > 1 and count % world == 0]
        if not worlds:
            raise ValueError(
                f"{count} microbatches cannot be spread evenly over {', '.join(map(str, ranks))} processes; compose the "
                "step with ps.split_batch(K) for a K that these divide"
            )
        expected = _applied(phase, state, phase.local(state, batch))
        for world in worlds:
            for calls in (False, True):
                sums = _shared(phase, state, batch, count, size, world, calls=calls)
                found = result_difference(expected, _applied(phase, state, sums))
                if found is not None:
                    raise PropertyError(
                        "spread invariant",
                        f"{count} microbatches over {world} {'calls' if calls else 'processes'} give other bits",
                        concern="the sums of the microbatches",
                        difference=found,
                        hint=_spread_hint(phase),
                    )


def _spread_hint(phase: Phase) -> str:
    if phase.accumulate.order != "tree":
        return 'accumulate(order="fold") does not promise it; order="tree" does'
    return "a microbatch may depend on nothing but its rows, the state and its key"


def _microbatches(phase: Phase, batch: Any) -> tuple[int, int]:
    if phase.split is None:
        return 1, rows(batch)
    parts = phase.split(batch)
    return len(parts), rows(parts[0])


def _shared(phase: Phase, state: TrainState, batch: Any, count: int, size: int, world: int, *, calls: bool) -> Sums:
    own = count // world
    share = attrs.evolve(phase, split=SplitBatch(None, size))
    total, sums = rows(batch), list[Sums]()
    for number in range(world):
        part = take_rows(batch, number * own * size, min((number + 1) * own * size, total))
        place = {"first": number * own} if calls else {"rank": number}
        sums.append(share.local(state, part, **place))
    return phase.accumulate(sums)


def _applied(phase: Phase, state: TrainState, sums: Sums) -> Any:
    with torch.no_grad():
        return phase.apply(state, sums)


_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Of the largest element of a leaf: rounding in sums of a few thousand terms."""


def assert_cut_invariant(
    step: Step | Jitted,
    state: Any,
    batch: Any,
    *,
    counts: Sequence[int] = (1, 2, 3),
    tolerance: float | None = None,
    examples: int = 20,
) -> None:
    """Assert that the gradients, the loss and the metrics do not depend on how the batch is cut into microbatches.

    Args:
        step: from ``compose``; without randomness, for a microbatch's key depends on its place.
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        counts: numbers of microbatches; those above the number of rows are left out.
        tolerance: the largest difference, as a share of the leaf's largest element; by default by dtype: 1e-11 in float64,
            2e-5 in float32, 5e-3 in float16, 5e-2 in bfloat16.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the cut, the leaf and both values.
        ValueError: if the step draws random numbers.
    """
    plain = step.step if isinstance(step, Jitted) else step
    for_each(lambda s, b: _cut(plain, s, b, counts, tolerance), state, batch, examples=examples)


def _cut(step: Step, state: TrainState, batch: Any, counts: Sequence[int], tolerance: float | None) -> None:
    for phase in step.phases:
        if draws(phase, state, batch):
            raise ValueError("the step draws random numbers, which a microbatch's place decides: switch dropout off")
        cut_invariant(phase, state, batch, counts, tolerance)


def cut_invariant(phase: Phase, state: TrainState, batch: Any, counts: Sequence[int], tolerance: float | None) -> None:
    """Compare what the sums divide to over these numbers of microbatches.

    Raises:
        PropertyError: naming the cut, the leaf and both values.
    """
    total, given = rows(batch), None
    for count in (count for count in counts if count <= total):
        found = _means(attrs.evolve(phase, split=SplitBatch(count, None)), state, batch)
        given = found if given is None else given
        wrong = _far(given, found, tolerance)
        if wrong is not None:
            raise PropertyError(
                "cut invariant", f"{count} microbatches instead of {counts[0]} move {wrong}", hint=_cut_hint(phase)
            )


def draws(phase: Phase, state: TrainState, batch: Any) -> bool:
    """Whether another key gives other sums."""
    one, other = (phase.local(state.replace(key=torch.tensor([seed, 0])), batch) for seed in (1, 2))
    return first_difference(one, other) is not None


def _means(phase: Phase, state: TrainState, batch: Any) -> Tree:
    sums = phase.local(state, batch)
    metrics = {name: metric.mean() for name, metric in sums.metrics.items()}
    loss = sums.loss / sums.weight.to(sums.loss.dtype)
    return {"grads": phase.accumulate.divide(sums), "metrics": {**metrics, "loss": loss}}


def _far(one: Tree, other: Tree, tolerance: float | None) -> str | None:
    theirs = dict(leaves_with_paths(other))
    sizes = [float(leaf.detach().abs().max()) for _, leaf in leaves_with_paths(one["grads"]) if leaf.numel()]
    largest = max(sizes, default=0.0)
    for path, leaf in leaves_with_paths(one):
        found = _far_leaf(path, leaf, theirs[path], tolerance, largest if "grads" in path else 0.0)
        if found is not None:
            return found
    return None


def _far_leaf(path: str, one: Tensor, other: Tensor, tolerance: float | None, floor: float) -> str | None:
    share = _TOLERANCE.get(one.real.dtype if one.is_complex() else one.dtype, 2e-5) if tolerance is None else tolerance
    apart = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    bound = share * max(float(one.abs().max()) if one.numel() else 0.0, 1e-3 * floor, 1e-30)
    if not one.numel() or float(apart.max()) <= bound:
        return None
    place = int(apart.reshape(-1).argmax())
    values = one.reshape(-1)[place].item(), other.reshape(-1)[place].item()
    return f"{path.lstrip('[').replace(']', '', 1)} by {float(apart.max()):.3g}: {values[0]!r} against {values[1]!r}"


def _cut_hint(phase: Phase) -> str:
    norms = normalising(phase)
    if norms:
        return f"module {norms[0]} normalises over its microbatch while training, so its result depends on the cut"
    return "return the sum of the loss over the rows with their number as weight: a mean of means depends on the cut"


def normalising(phase: Phase) -> list[str]:
    """The modules that normalise over their microbatch."""
    template = phase.forward.template
    return (
        [] if template is None else [n for n, m in template.module.named_modules() if _is_batch_norm(m) and m.training]
    )


_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, _NORMS)
