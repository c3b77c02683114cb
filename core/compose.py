"""Compose: a line of concerns becomes one pure step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.errors import ComposeError
from ..state.record import TrainState
from ..state.tree import Tree, as_tensors, flatten, unflatten
from ..steps.accumulate import Accumulate
from ..steps.backward import Backward
from ..steps.concern import KINDS, Concern, Custom
from ..steps.faults import raise_fault
from ..steps.forward import Forward
from ..steps.keyed_modules import refuse_unkeyed
from ..steps.schedule import ScheduleConcern
from ..steps.split_batch import SplitBatch
from ..steps.step import OptimizerStep
from .checks import check_batch, check_result, check_state, refuse_inference_mode
from .device import Device
from .phase import Phase

__all__ = ["Step", "compose"]

Metrics = dict[str, Tensor]

_GIVES = {"loss": "forward", "sums": "backward", "grads": "accumulate", "state": "step"}


def compose(*concerns: Concern | Callable[..., Any]) -> Step:
    """A step from its concerns, in the order in which a batch meets them.

    ``split_batch`` (optional), ``forward``, ``backward``, ``accumulate``, then ``clip`` and ``schedule`` as you like, then
    ``step``. A function of your own may stand between any two: it maps what flows there, a batch, a microbatch, a
    ``Loss``, ``Sums``, gradients or, after ``step``, the new state.

    Args:
        *concerns: concerns, and functions of one argument.

    Returns:
        A pure function ``(state, batch) -> (state, metrics)``.

    Raises:
        ComposeError: if the order is wrong or a concern is missing, naming it.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        >>> state, metrics = step(ps.init(torch.tensor(0.0), step, seed=0), torch.tensor([1.0, 3.0]))
        >>> float(state.params), float(metrics["grad_norm"])
        (-2.0, 2.0)
    """
    placed = _place(concerns)
    of = {kind: tuple(c for c in placed if isinstance(c, Custom) and c.takes == kind) for kind in KINDS}
    whole = [c for c in placed if not isinstance(c, Custom)]
    phase = Phase(
        batch=of["batch"],
        split=next((c for c in whole if isinstance(c, SplitBatch)), None),
        microbatch=of["microbatch"],
        forward=_only(whole, Forward, "forward"),
        loss=of["loss"],
        backward=_only(whole, Backward, "backward"),
        sums=of["sums"],
        accumulate=_only(whole, Accumulate, "accumulate"),
        after=tuple(c for c in placed if c.takes in ("grads", "state")),
    )
    return Step(tuple(placed), (phase,))


def _only(concerns: list[Any], kind: type, name: str) -> Any:
    found = [c for c in concerns if isinstance(c, kind)]
    if len(found) != 1:
        raise ComposeError(f"compose: a step needs {name} once, got it {len(found)} times")
    return found[0]


def _place(concerns: tuple[Any, ...]) -> list[Any]:
    """Each concern at its kind, checked against what flows there."""
    placed: list[Any] = []
    flows, names = "batch", set[str]()
    for concern in concerns:
        if not isinstance(concern, Concern):
            concern = _own(concern, flows, len(placed))
        elif isinstance(concern, Custom):
            concern = attrs.evolve(concern, takes=flows, place=len(placed))
        if isinstance(concern, Custom):
            _refuse_left(concern)
        else:
            _refuse_order(concern, flows)
            flows = concern.gives
        for slot in concern.slot_names:
            if slot in names:
                raise ComposeError(f"compose: two concerns declare a slot named {slot!r}; give one another name")
            names.add(slot)
        placed.append(concern)
    _check_schedules(placed)
    if flows != "state":
        raise ComposeError(f"compose: {_missing(flows, 'state')} missing: the line ends with {flows}, not with a state")
    return placed


def _check_schedules(placed: list[Any]) -> None:
    ranges = next((c.optimizer.ranges for c in placed if isinstance(c, OptimizerStep)), None)
    for concern in placed:
        if ranges is not None and isinstance(concern, ScheduleConcern):
            concern.check_for(ranges)


def _own(fn: Any, flows: str, place: int) -> Custom:
    if not callable(fn) or isinstance(fn, (type, torch.nn.Module)):
        raise ComposeError(f"compose: {fn!r} is neither a concern nor a function")
    try:
        wants_key = "key" in inspect.signature(fn).parameters
    except ValueError:  # a builtin without a signature
        wants_key = False
    return Custom(fn, flows, wants_key=wants_key, place=place)


def _refuse_left(concern: Custom) -> None:
    if concern.takes not in ("grads", "state") and (concern.slot is not None or concern.has_aux):
        raise ComposeError(
            f"compose: {concern.name} has a slot or metrics and stands before accumulate, where a function runs once per "
            "microbatch; put it after accumulate, or return metrics in ps.Loss(metrics=...)"
        )


def _refuse_order(concern: Concern, flows: str) -> None:
    wanted = concern.takes
    if wanted == flows or (wanted == "microbatch" and flows == "batch"):
        return
    name = type(concern).__name__
    if KINDS.index(wanted) < KINDS.index(flows):
        raise ComposeError(f"compose: {name} takes a {wanted}, but here {flows} flow; it stands too late or twice")
    raise ComposeError(
        f"compose: {_missing(flows, wanted)} missing before {name}, which takes {wanted}; here flows {flows}"
    )


def _missing(flows: str, wanted: str) -> str:
    between = KINDS[KINDS.index(flows) + 1 : KINDS.index(wanted) + 1]
    names = [_GIVES[kind] for kind in between if kind in _GIVES]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _refuse_unkeyed(step: Step) -> None:
    for phase in step.phases:
        if phase.forward.template is not None:
            refuse_unkeyed(phase.forward.template.module)


@attrs.frozen(eq=False)
class Step:
    """A pure training step: ``step(state, batch) -> (state, metrics)``; see :func:`compose`.

    Attributes:
        concerns: in order, as composed.
        phases: what a device runs: local, reduce, apply.
    """

    concerns: tuple[Concern, ...]
    phases: tuple[Phase, ...]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step, eagerly; nothing that is given changes.

        Args:
            state: made by ``init(model, step)``, or returned by a step.
            batch: any tree of tensors.

        Returns:
            The new state, and metrics as 0-d tensors: ``loss``, ``grad_norm``, ``lr``, ``weight``, ``updated``,
            ``fault`` and the loss function's own.

        Raises:
            StateError: if the state does not fit the step.
            BatchError: if the batch cannot be used.
            LossError: if the loss function returns something unusable.
            NumericsError: if a weight or a rate is not a usable number (on the CPU, where looking costs nothing).
        """
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling:
            _refuse_unkeyed(self)
        else:
            refuse_inference_mode()
            check_state(self, state)
            batch = as_tensors(batch)
            check_batch(state, batch)
        with torch.no_grad():
            new, metrics = self.run(state, batch)
        if not compiling:
            check_result(state, new)
            if metrics["fault"].device.type == "cpu":
                raise_fault(metrics)
        return new, metrics

    def trainable(self, params: Tree) -> Tree:
        """The params that will have gradients, ``None`` in place of the others."""
        values, treedef = flatten(params)
        rule = self.phases[0].forward.is_trainable
        pairs = zip(treedef.paths(), values, strict=True)
        return unflatten(treedef, [leaf if rule(path, leaf) else None for path, leaf in pairs])

    def apart(self) -> Step:
        """The same step with templates of its own."""
        own: dict[int, Any] = {id(phase.forward): phase.forward.apart() for phase in self.phases}
        phases = tuple(attrs.evolve(phase, forward=own[id(phase.forward)]) for phase in self.phases)
        return attrs.evolve(self, concerns=tuple(own.get(id(c), c) for c in self.concerns), phases=phases)

    def run(self, state: TrainState, batch: Any, device: Device | None = None) -> tuple[TrainState, Metrics]:
        """The step without its checks: what is traced. A device reduces the sums between local and apply."""
        metrics: Metrics = {}
        for phase in self.phases:
            sums = phase.local(state, batch, rank=0 if device is None else device.rank)
            state, found = phase.apply(state, sums if device is None else device.reduce(sums))
            metrics.update(found)
        return state, metrics
