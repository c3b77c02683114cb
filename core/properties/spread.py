"""Indifference to how a batch is spread over processes and calls, and to how it is cut into microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ...state.record import TrainState
from ...state.sums import Sums
from ...state.tree import Tree, leaves, leaves_with_paths
from ...steps.random_ops import calm
from ...steps.split_batch import SplitBatch, rows, take_rows
from ..compose import Step
from ..jitted import Jitted
from ..phase import Phase
from .difference import first_difference, result_difference
from .failure import NotAskedError, PropertyError, for_each, plain_step

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
        NotAskedError: if the step has no microbatches that could be spread.
        ValueError: if a number of processes is no power of two.
    """
    wrong = [world for world in ranks if world < 1 or world & (world - 1)]
    if wrong or not ranks:
        raise ValueError(f"ranks must be powers of two, got {list(ranks)}")
    plain = plain_step(step)
    for_each(lambda s, b: _spread(plain, s, b, ranks), state, batch, examples=examples)


def _spread(step: Step, state: TrainState, batch: Any, ranks: Sequence[int]) -> None:
    for phase in step.phases:
        count, size = _microbatches(phase, batch)
        worlds = [world for world in ranks if world > 1 and count % world == 0]
        if not worlds:
            raise NotAskedError(
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
    if phase.batch:
        return f"{phase.batch[0].name} stands before split_batch and sees other rows on each process; put it after"
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
"""Of the largest gradient: rounding in sums of a few thousand terms."""


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

    Random operations of plain torch code are answered with their means meanwhile (dropout keeps every unit), for a
    microbatch's key depends on its place; batch normalisation takes its running statistics, for those of a microbatch do.

    Args:
        step: from ``compose``, or compiled: then its step is meant.
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        counts: numbers of microbatches; those above the number of rows are left out.
        tolerance: the largest difference, as a share of the largest gradient (or of the metric); by default by the coarsest
            dtype of the params: 1e-11 for float64, 2e-5 for float32, 5e-3 for float16, 5e-2 for bfloat16.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming the cut, the leaf that is farthest off and both values.
        NotAskedError: if the loss draws from its key itself, or no row of the batch counts.
        ValueError: if there are not two numbers of microbatches to compare.
    """
    plain = plain_step(step)
    if len(set(counts)) < 2 or min(counts) < 1:
        raise ValueError(f"counts must be at least two positive numbers, got {list(counts)}")
    for_each(lambda s, b: _cut(plain, s, b, counts, tolerance), state, batch, examples=examples)


def _cut(step: Step, state: TrainState, batch: Any, counts: Sequence[int], tolerance: float | None) -> None:
    for phase in map(settled, step.phases):
        if draws(phase, state, batch):
            raise NotAskedError("the loss draws random numbers from its key, which a microbatch's place decides")
        cut_invariant(phase, state, batch, counts, tolerance)


def draws(phase: Phase, state: TrainState, batch: Any) -> bool:
    """Whether another key gives other sums, with plain random operations answered by their means."""
    keys = (torch.tensor([seed, 0], device=state.key.device) for seed in (1, 2))
    with calm():
        one, other = (phase.local(state.replace(key=key), batch) for key in keys)
    return first_difference(one, other) is not None


def cut_invariant(
    phase: Phase,
    state: TrainState,
    batch: Any,
    counts: Sequence[int],
    tolerance: float | None,
    name: str = "cut invariant",
) -> None:
    """Compare what the sums divide to over these numbers of microbatches.

    Raises:
        PropertyError: naming the cut, the leaf and both values.
        NotAskedError: if no row of the batch counts.
    """
    total = rows(batch)
    usable = [count for count in counts if count <= total]
    given = _means(phase, state, batch, usable[0])
    if not bool(torch.isfinite(given["metrics"]["loss"])):
        raise NotAskedError(
            f"the loss is {float(given['metrics']['loss'])}: no row of the batch counts, or a number overflowed"
        )
    share = _share(state) if tolerance is None else tolerance
    # Of one microbatch, for at a minimum the gradient of the whole batch is nothing but rounding.
    part = _means(phase, state, take_rows(batch, 0, -(-total // max(usable))), 1)
    floor = max(_largest(given["grads"]), _largest(part["grads"]))
    for count in usable[1:]:
        wrong = _farthest(given, _means(phase, state, batch, count), share, floor)
        if wrong is not None:
            why = f"{count} microbatches instead of {usable[0]} move {wrong}"
            raise PropertyError(name, why, hint=_CUT_HINT)


def _share(state: TrainState) -> float:
    return max(_TOLERANCE.get(x.real.dtype if x.is_complex() else x.dtype, 0.0) for x in leaves(state.params))


def _means(phase: Phase, state: TrainState, batch: Any, count: int) -> Tree:
    with calm():
        sums = attrs.evolve(phase, split=SplitBatch(count, None)).local(state, batch)
    metrics = {name: metric.mean() for name, metric in sums.metrics.items()}
    loss = sums.loss / sums.weight.to(sums.loss.dtype)
    return {"grads": phase.accumulate.divide(sums), "metrics": {**metrics, "loss": loss}}


def _largest(grads: Tree) -> float:
    sizes = [float(leaf.detach().abs().max()) for leaf in leaves(grads) if leaf.numel()]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _farthest(one: Tree, other: Tree, share: float, floor: float) -> str | None:
    """The leaf that is farthest beyond its bound, in words."""
    theirs, worst, words = dict(leaves_with_paths(other)), 1.0, None
    for path, leaf in leaves_with_paths(one):
        wide, twin = leaf.detach().to(torch.complex128), theirs[path].detach().to(torch.complex128)
        apart = torch.where(torch.isnan(wide.real) & torch.isnan(twin.real), 0.0, (wide - twin).abs())
        if not leaf.numel():
            continue
        own = float(wide.abs().max()) if "metrics" in path else floor
        ratio = float(apart.max()) / max(share * own, 1e-30)
        if ratio > worst or math.isnan(ratio):
            place = int(apart.reshape(-1).argmax())
            values = leaf.reshape(-1)[place].item(), theirs[path].reshape(-1)[place].item()
            worst, words = ratio, f"{path} by {float(apart.max()):.3g}: {values[0]!r} against {values[1]!r}"
    return words


_CUT_HINT = (
    "return the sum of the loss over the rows with their number as weight, for a mean of means depends on the cut; so does "
    "a loss in which the rows of a microbatch interact"
)


def settled(phase: Phase) -> Phase:
    """The phase with modules that normalise over their microbatch set to their running statistics."""
    forward = phase.forward.apart()
    if forward.template is not None:
        for module in forward.template.module.modules():
            if _is_batch_norm(module):
                module.eval()
    return attrs.evolve(phase, forward=forward)


_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, _NORMS)
