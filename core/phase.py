"""A phase: the concerns of one optimizer as two pure functions, with room for a device between them.

``local(state, batch) -> Sums`` is one process's share, ``apply(state, Sums) -> (state, metrics)`` the update; what lies
between is addition.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.errors import LossError, StateError
from ..state.key import fold_in
from ..state.record import Counters, TrainState
from ..state.spec import difference
from ..state.sums import Sum, Sums
from ..state.torch_private import is_tracing
from ..state.tree import Tree, as_tensors, map_leaves, own_containers
from ..steps.accumulate import Accumulate
from ..steps.backward import Backward
from ..steps.concern import Applied, Custom, Flow
from ..steps.faults import WEIGHT
from ..steps.forward import Forward
from ..steps.norm import global_norm
from ..steps.scope import name_of, scope
from ..steps.split_batch import SplitBatch, rows
from .own_functions import RESERVED, Then, checked, expect

__all__ = ["Phase"]


Metrics = dict[str, Tensor]


@attrs.frozen(eq=False)
class Phase:
    """The concerns of one optimizer, sorted by place.

    Attributes:
        batch: functions on the batch.
        split: the cut into microbatches, if there is one.
        microbatch: functions on a microbatch.
        forward: the loss.
        loss: functions on the ``Loss``.
        backward: the gradients.
        sums: functions on the ``Sums`` of one microbatch.
        accumulate: the fold and the division.
        after: concerns on the gradients and, after ``step``, on the state.
    """

    batch: tuple[Custom, ...]
    split: SplitBatch | None
    microbatch: tuple[Custom, ...]
    forward: Forward
    loss: tuple[Custom, ...]
    backward: Backward
    sums: tuple[Custom, ...]
    accumulate: Accumulate
    after: tuple[Applied, ...]

    def local(self, state: TrainState, batch: Any, *, first: int = 0, rank: int = 0) -> Sums:
        """The sums of one process's batch.

        Args:
            state: the training state; not changed.
            batch: this process's rows.
            first: the global index of the first microbatch of rank 0.
            rank: this process's number; each has as many microbatches.

        Raises:
            BatchError: if the batch cannot be split.
            LossError: if the loss function returns something unusable.
        """
        key = fold_in(state.key, state.counters.updates + state.counters.skips)
        batch = _lent(as_tensors(batch))
        for fn in self.batch:
            batch = fn.call(batch, key)
        parts = self.split(batch) if self.split is not None else _whole(batch)
        places = torch.arange(len(parts), dtype=torch.int64, device=key.device) + (first + rank * len(parts))
        with scope("accumulate"):
            return self.accumulate.local(self._one, state.params, parts, fold_in(key, places), state.buffers)

    def _one(self, params: Tree, microbatch: Any, key: Tensor, buffers: dict[str, Tensor]) -> Sums:
        for fn in self.microbatch:
            microbatch = fn.call(microbatch, key)
        loss_fn = Then(self.forward, self.loss) if self.loss else self.forward
        with scope("backward"):
            sums = self.backward(loss_fn, params, microbatch, key, buffers=buffers)
        for fn in self.sums:
            sums = expect(fn.call(sums, key), Sums, fn)
        return sums

    def apply(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        """The state after the update, and the metrics: 0-d tensors.

        Where the weight is zero or a concern says so, the update does not happen: everything but the counters of
        batches, samples and skips stays. Where a number is unusable (``metrics["fault"]``), nothing changes at all.

        Raises:
            LossError: if a metric has a name that the step reports itself.
        """
        taken = [name for name in sums.metrics if name in RESERVED]
        if taken:
            raise LossError(f"metrics {', '.join(taken)} are reported by the step itself; choose another name")
        weight = sums.weight
        usable = (sums.unusable == 0) & ((weight == 0) | ((weight >= _SMALLEST) & (weight <= _LARGEST)))
        zero = torch.zeros((), dtype=torch.int64, device=weight.device)
        key = fold_in(state.key, state.counters.updates + state.counters.skips)
        grads = self.accumulate.divide(sums)
        flow = Flow(grads, state, weight > 0, torch.where(usable, zero, zero + WEIGHT), {}, {}, state.slots, key)
        for concern in self.after:
            with scope(name_of(concern)):
                flow = checked(concern, flow, concern.apply(flow))
            if concern.gives == "state" != concern.takes:
                flow = flow.replace(value=self._moved(flow, sums))
        if "grad_norm" not in flow.metrics:
            flow = flow.replace(metrics={"grad_norm": global_norm(grads), **flow.metrics})
        updated = flow.ok & (flow.fault == 0)
        state = flow.value.replace(**{name: _choose(updated, flow.value, state, name) for name in _GATED})
        own = {"loss": _mean_loss(sums), "weight": sums.weight, "updated": updated, "fault": flow.fault}
        users = {name: metric.mean() for name, metric in sums.metrics.items()}
        return state, {**users, **flow.metrics, **own}

    def _moved(self, flow: Flow, sums: Sums) -> TrainState:
        """The state that the optimizer gave with all else that an update moves: what functions after ``step`` see."""
        old, sound = flow.state, flow.fault == 0
        moved: TrainState = flow.value.replace(
            buffers=self.accumulate.divide_buffers(sums, old.buffers),
            window=old.window.append(_mean_loss(sums)),
            slots=flow.slots,
            counters=_advance(old.counters, sums.samples, flow.ok & sound, sound),
        )
        return moved


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Weights that float32 gradients can be divided by."""


def _lent(batch: Any) -> Any:
    """The batch in containers and tensors of the step's own, over the same memory: a flag set on one stays here."""
    if is_tracing():
        return own_containers(batch)
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)


def _whole(batch: Any) -> list[Any]:
    rows(batch)
    return [batch]


def _mean_loss(sums: Sums) -> Tensor:
    return Sum(sums.loss, sums.weight).mean()


def _advance(old: Counters, samples: Tensor, updated: Tensor, sound: Tensor) -> Counters:
    done, counted = updated.to(torch.int64), sound.to(torch.int64)
    return Counters(
        updates=old.updates + done,
        batches=old.batches + counted,
        samples=old.samples + samples * counted,
        skips=old.skips + counted - done,
        epochs=old.epochs,
    )


_GATED = ("params", "buffers", "opt_state", "window", "slots")


def _choose(happened: Tensor, new: TrainState, old: TrainState, field: str) -> Tree:
    """A field of ``new`` where the update happened, else of ``old``; leaves that no concern touched are handed on."""
    fresh, stale = getattr(new, field), getattr(old, field)
    if fresh is stale or (isinstance(fresh, dict) and not fresh):
        return fresh
    try:
        return map_leaves(lambda a, b: b if a is b else _where(happened, a, b), fresh, stale)
    except ValueError as error:
        found = difference(stale, fresh, f"state.{field}")
        raise StateError(
            f"the step gives state.{field} another form than it had: {found}. Make the state with ps.init(model, step) for "
            "this very step; a function of your own must keep structure, shapes and dtypes"
        ) from error


def _where(happened: Tensor, new: Tensor, old: Tensor) -> Tensor:
    if new.dtype != old.dtype or new.shape != old.shape:  # where would promote or broadcast in silence
        raise ValueError(f"{new.dtype} of shape {tuple(new.shape)} for {old.dtype} of shape {tuple(old.shape)}")
    return torch.where(happened, new, old)
