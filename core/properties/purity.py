"""A step changes nothing that it is given, and keeps nothing alive."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from ...state.errors import NumericsError, PurityError
from ...state.record import TrainState
from ...state.sums import Loss
from ...state.torch_private import storage_of
from ...state.tree import leaves_with_paths
from ...steps.concern import Custom
from ..closures import held
from ..compose import Step
from ..jitted import Jitted
from .difference import first_difference
from .failure import PropertyError, for_each, plain_step, undonated
from .world import GENERATOR, changed, snapshot, world

__all__ = ["assert_no_leak", "assert_pure"]


def assert_pure(step: Step | Jitted, state: Any, batch: Any, *, examples: int = 20) -> None:
    """Assert that a step changes nothing it is given, also when its loss raises, and that no two leaves share memory.

    Args:
        step: from ``compose``, or compiled (without donation).
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming what was changed.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        >>> ps.properties.assert_pure(step, ps.init(torch.tensor(0.0), step), torch.ones(2))
    """
    step = undonated(step)
    for_each(lambda s, b: _pure(step, s, b), state, batch, examples=examples)


def _pure(step: Step | Jitted, state: TrainState, batch: Any) -> None:
    plain = plain_step(step)
    _unchanged(plain, state, batch, lambda: step(state, batch))
    _own_memory(step, state, batch)
    raising = _raising(plain)

    def fail() -> None:
        try:
            raising(state, batch)
        except _PlantedError:
            return

    _unchanged(raising, state, batch, fail, " when the loss raises")


def _unchanged(step: Step, state: TrainState, batch: Any, run: Callable[[], Any], when: str = "") -> None:
    given, around = snapshot((state, batch)), world(step)
    try:
        run()
    except PurityError as error:
        raise PropertyError(
            "pure", str(error), hint="use the form of the operation that returns a new tensor"
        ) from error
    except NumericsError:
        pass  # refused, which is what it should do; the state is compared all the same
    found = first_difference(given, (state, batch), "given")
    if found is not None:
        raise PropertyError("pure", f"the step changed what it was given{when}", difference=found)
    moved = changed(around, world(step))
    if moved is not None:
        raise PropertyError("pure", f"the step changed {moved}{when}", hint=_HINTS.get(moved, ""))


_HINTS = {f"{whose} global generator": GENERATOR for whose in ("torch's", "numpy's", "python's")}


class _PlantedError(Exception):
    pass


def _raising(step: Step) -> Step:
    """The step with a loss that raises after all its work."""

    def after(loss: Loss) -> Loss:
        raise _PlantedError

    last = Custom(after, "loss", place=-1)
    return attrs.evolve(step, phases=tuple(attrs.evolve(p, loss=(*p.loss, last)) for p in step.phases))


def _own_memory(step: Step | Jitted, state: TrainState, batch: Any) -> None:
    """No leaf of what a step returns may change when another one, or the batch, is written."""
    new, metrics = step(state, batch)
    old = {id(leaf) for _, leaf in leaves_with_paths(state)}
    owners = {storage_of(leaf): path for path, leaf in leaves_with_paths(batch, "batch") if isinstance(leaf, Tensor)}
    owners |= {storage_of(leaf): f"the old {path}" for path, leaf in leaves_with_paths(state, "state")}
    owners.pop(None, None)
    for path, leaf in (*leaves_with_paths(new, "state"), *leaves_with_paths(metrics, "metrics")):
        if not leaf.numel() or (id(leaf) in old and path.startswith("state")):
            continue
        other = owners.setdefault(storage_of(leaf), path)
        if other != path:
            raise PropertyError(
                "pure", f"{path} shares its memory with {other}", hint="return a new tensor, or a clone"
            )


def assert_no_leak(step: Step | Jitted, state: Any, batch: Any, *, steps: int = 6, examples: int = 3) -> None:
    """Assert that nothing of a step is alive after it but the state and the metrics: no graph, no activations.

    Args:
        step: from ``compose``, or compiled (without donation).
        state: a state, or a hypothesis strategy for states.
        batch: a batch, or a hypothesis strategy for batches.
        steps: how many steps are run.
        examples: how many generated inputs are tried.

    Raises:
        PropertyError: naming what grows, and the variable of the loss that holds it where that is found.
        ValueError: if ``steps`` is below 4.
    """
    if steps < _FEWEST:
        raise ValueError(f"steps must be at least {_FEWEST}, got {steps}: what a first step leaves is no leak")
    step = undonated(step)
    for_each(lambda s, b: _no_leak(step, s, b, steps), state, batch, examples=examples)


_FEWEST = 4


def _no_leak(step: Step | Jitted, state: TrainState, batch: Any, steps: int) -> None:
    plain = plain_step(step)
    counts: list[int] = []
    known: set[int] = set()
    extra: list[Tensor] = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        for name, value in metrics.items():
            if value.requires_grad:
                raise PropertyError("free of leaks", f"metrics[{name!r}] holds the graph of its step", hint="detach it")
        gc.collect()
        alive = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        extra = [x for x in alive if id(x) not in known]
        counts.append(len(alive))
        known = {id(x) for x in alive}
        del alive
    late = counts[2:]
    if all(after > before for before, after in itertools.pairwise(late)):
        leaf = next((x for x in extra if _holder(plain, x)), extra[-1])
        raise PropertyError(
            "free of leaks",
            f"each step leaves {late[-1] - late[-2]} tensors alive, such as one of shape {tuple(leaf.shape)} "
            f"({leaf.dtype}){_holder(plain, leaf)}",
            hint="return what is wanted from a step in metrics, detached",
        )


def _holder(step: Step, tensor: Tensor) -> str:
    for name, value in held(step):
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else ()
        if any(x is tensor for x in inside):
            return f", held by {name}"
    return ""
