"""What a concern is: one part of a step, what it takes and gives, and the state it needs.

A step is a line of concerns. What flows along the line changes its kind at each of them::

    batch  -> split_batch -> microbatch -> forward -> loss -> backward -> sums -> accumulate -> grads -> step -> state

Left of ``accumulate`` a concern wraps the one before it and runs once per microbatch; right of it a concern maps a
:class:`Flow`. A plain function may stand anywhere: it maps what flows at its place to the same kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
from torch import Tensor

from ..state.key import fold_in
from ..state.record import TrainState
from ..state.records import Record, set_fields
from ..state.tree import Tree, own_containers
from .guard import Guard
from .random_ops import keyed

__all__ = ["KINDS", "Applied", "Concern", "Custom", "Flow", "Stateless", "concern"]

KINDS = ("batch", "microbatch", "loss", "sums", "grads", "state")
"""What flows along a step, in order."""


@attrs.frozen(init=False, eq=False, slots=False)
class Flow(Record):
    """What flows right of ``accumulate``.

    Attributes:
        value: the gradients; after ``step`` the new state.
        state: the state that the update started from.
        ok: 0-d bool, whether the update will happen.
        fault: 0-d int64, nonzero where a number was unusable (see ``faults.py``).
        metrics: 0-d tensors by name.
        hyper: values for the optimizer's hyperparameters by name, set by ``schedule``.
        slots: the slots of the new state.
        key: this update's key.
    """

    value: Any
    state: TrainState
    ok: Tensor
    fault: Tensor
    metrics: dict[str, Tensor]
    hyper: dict[str, Tensor]
    slots: dict[str, Tree]
    key: Tensor

    def __init__(
        self,
        value: Any,
        state: TrainState,
        ok: Tensor,
        fault: Tensor,
        metrics: dict[str, Tensor],
        hyper: dict[str, Tensor],
        slots: dict[str, Tree],
        key: Tensor,
    ) -> None:
        set_fields(
            self,
            value=value,
            state=state,
            ok=ok,
            fault=fault,
            metrics=metrics,
            hyper=hyper,
            slots=slots,
            key=key,
        )


@runtime_checkable
class Concern(Protocol):
    """One part of a step.

    Attributes:
        takes: the kind of what flows into it, one of :data:`KINDS`.
        gives: the kind of what flows out of it.
        slot_names: the names of the state it needs beyond params and buffers.
    """

    takes: Any
    gives: Any
    slot_names: Any

    def slots(self, params: Tree) -> Mapping[str, Tree]:
        """The state it needs by slot name, freshly made for ``params`` (``None`` where a leaf is frozen)."""
        ...


class Stateless:
    """A concern that needs no state of its own."""

    slot_names: ClassVar[tuple[str, ...]] = ()

    def slots(self, params: Tree) -> Mapping[str, Tree]:
        """None."""
        return {}


@runtime_checkable
class Applied(Concern, Protocol):
    """A concern right of ``accumulate``."""

    def apply(self, flow: Flow) -> Flow:
        """The flow after this concern."""
        ...


@attrs.frozen
class Custom:
    """A user's function as a concern; see :func:`concern`."""

    fn: Callable[..., Any]
    takes: str = ""
    slot: str | None = None
    init: Callable[[Tree], Tree] | None = None
    has_aux: bool = False
    wants_key: bool = False
    place: int = 0

    @property
    def gives(self) -> str:
        """The kind it takes: a function does not change what flows."""
        return self.takes

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Its slot, if it has one."""
        return () if self.slot is None else (self.slot,)

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def slots(self, params: Tree) -> Mapping[str, Tree]:
        """What ``init`` makes of the params, under the slot's name."""
        return {} if self.slot is None or self.init is None else {self.slot: self.init(params)}

    def call(self, value: Any, key: Tensor | None, *slot: Tree) -> Any:
        """The function's result; its random operations are drawn from ``key``."""
        own = None if key is None else fold_in(key, _OWN + self.place)
        extra = {"key": own} if self.wants_key else {}
        value, slot = own_containers(value), own_containers(slot)
        with keyed(own, Guard(**{self.takes or "value": value, "slot": slot, "key": own})):
            return self.fn(value, *slot, **extra)

    def apply(self, flow: Flow) -> Flow:
        """The flow with its value mapped, the slot renewed and the metrics added."""
        held = () if self.slot is None else (flow.slots[self.slot],)
        result, metrics, slots = self.call(flow.value, flow.key, *held), flow.metrics, flow.slots
        if self.has_aux:
            result, more = self._pair(result, "(value, metrics)")
            metrics = {**metrics, **more}
        if self.slot is not None:
            result, renewed = self._pair(result, "(value, slot)")
            slots = {**slots, self.slot: renewed}
        if self.takes == "state" and isinstance(result, TrainState):  # there the slots are part of what flows
            own = {} if self.slot is None else {self.slot: slots[self.slot]}
            slots = {**result.slots, **own}
            result = result.replace(slots=slots)
        return flow.replace(value=result, slots=slots, metrics=metrics)

    def _pair(self, result: Any, form: str) -> tuple[Any, Any]:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"{self.name} must return {form}, got {type(result).__name__}")
        return result


_OWN = 2**61  # folds for functions of the user's own, far from the indices of microbatches


def concern(
    fn: Callable[..., Any],
    *,
    slot: str | None = None,
    init: Callable[[Tree], Tree] | None = None,
    has_aux: bool = False,
) -> Custom:
    """A function of your own as a concern, for what a plain function in ``compose`` cannot say.

    Its place decides what it maps: a batch, a microbatch, a ``Loss``, the ``Sums`` of one microbatch, the gradients, or
    after ``step`` the new state. Where it has a parameter named ``key`` it is given the update's key.

    Args:
        fn: ``fn(value) -> value``; with a slot ``fn(value, slot) -> (value, slot)``; with ``has_aux`` the result is
            paired with a dict of metrics: ``(result, metrics)``.
        slot: name of a piece of state of its own, kept in ``state.slots`` (right of ``accumulate`` only).
        init: ``init(params)`` makes the slot's first value.
        has_aux: whether ``fn`` returns metrics too (right of ``accumulate`` only).

    Raises:
        ComposeError: when composed left of ``accumulate`` with a slot or metrics.
        ValueError: if only one of ``slot`` and ``init`` is given.

    Example:
        >>> import purestep as ps
        >>> def ema(state, mean):
        ...     return state, ps.map_leaves(lambda m, p: m + 0.1 * (p - m), mean, state.params)
        >>> after_step = ps.concern(ema, slot="ema", init=lambda params: params)
    """
    if (slot is None) != (init is None):
        raise ValueError("slot and init go together: a name, and a function of the params that makes the first value")
    return Custom(fn, "", slot, init, has_aux, "key" in inspect.signature(fn).parameters)
