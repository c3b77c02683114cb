"""The training state: one immutable record of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import attrs
import torch
from torch import Tensor

from .errors import DonatedError
from .layout import Layout
from .records import Record, set_fields
from .tree import Tree, TreeDef, flatten, leaves, map_leaves, register, unflatten
from .window import RunningWindow

__all__ = ["Counters", "TrainState", "copy_state"]


@attrs.frozen(init=False, eq=False, slots=False)
class Counters:
    """The clocks of a run: 0-d int64 tensors.

    Attributes:
        updates: optimizer updates that happened; schedules follow this one.
        batches: calls of the step.
        samples: rows seen.
        skips: updates that did not happen (an empty window, a value that is not finite).
        epochs: passes over the data; the loop moves it, the step does not.
    """

    updates: Tensor
    batches: Tensor
    samples: Tensor
    skips: Tensor
    epochs: Tensor

    def __init__(self, updates: Tensor, batches: Tensor, samples: Tensor, skips: Tensor, epochs: Tensor) -> None:
        set_fields(self, updates=updates, batches=batches, samples=samples, skips=skips, epochs=epochs)

    @classmethod
    def zero(cls, device: torch.device | str | None = None) -> Counters:
        """All clocks at zero.

        Example:
            >>> int(Counters.zero().updates)
            0
        """
        return cls(*(torch.zeros((), dtype=torch.int64, device=device or "cpu") for _ in range(5)))


@attrs.frozen(init=False, eq=False, repr=False, slots=False)
class TrainState(Record):
    """Everything that training changes, in one record; made by ``init``, never changed in place.

    A record that a compiled step returned keeps its leaves flat until a field is read, so that a loop which only hands
    the state on never rebuilds the trees. A record whose tensors were donated raises on any read.

    Attributes:
        params: tree of tensors; for a module ``{name: tensor}``, tied weights once.
        buffers: the module's buffers by name.
        opt_state: what the optimizer keeps.
        counters: the clocks.
        window: the last losses.
        key: int64 tensor of shape (2,); every random number of a step is folded from it.
        slots: what other concerns declared, by slot name.
        layout: which names share a leaf and which buffers a ``state_dict`` leaves out; static.

    Raises:
        DonatedError: on reading a field after the state was donated to a compiled step.
    """

    params: Tree
    buffers: dict[str, Tensor]
    opt_state: Tree
    counters: Counters
    window: RunningWindow
    key: Tensor
    slots: dict[str, Tree]
    layout: Layout

    def __init__(
        self,
        params: Tree,
        buffers: dict[str, Tensor],
        opt_state: Tree,
        counters: Counters,
        window: RunningWindow,
        key: Tensor,
        slots: dict[str, Tree],
        layout: Layout,
    ) -> None:
        set_fields(
            self,
            params=params,
            buffers=buffers,
            opt_state=opt_state,
            counters=counters,
            window=window,
            key=key,
            slots=slots,
            layout=layout,
        )

    def replace(self, **changes: Any) -> TrainState:
        """A new record with some fields changed; it shares the other fields' tensors with this one.

        Raises:
            TypeError: naming a field that does not exist.
        """
        new = super().replace(**changes)
        if not torch.compiler.is_dynamo_compiling():
            _relate(self, new)
        return new

    def __repr__(self) -> str:
        if "_consumed" in self.__dict__:
            return f"TrainState(donated: {self.__dict__['_consumed']})"
        tensors = [leaf for leaf in leaves(self) if isinstance(leaf, Tensor)]
        size = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        return f"TrainState(updates={self.counters.updates}, leaves={len(tensors)}, bytes={size})"

    def __getattr__(self, name: str) -> Any:
        # Reached only when the field is not set: the record was donated, or still holds its leaves flat.
        if name in _FIELDS:
            reason = self.__dict__.get("_consumed")
            if reason is not None:
                raise DonatedError(f"state.{name}: {reason}")
            flat = self.__dict__.get("_flat")
            if flat is not None:
                whole = unflatten(flat.treedef, flat.leaves)
                self.__dict__.update({field: whole.__dict__[field] for field in _FIELDS})
                return self.__dict__[name]
        raise AttributeError(f"TrainState has no attribute {name!r}")


_FIELDS = tuple(field.name for field in attrs.fields(TrainState))

register(Counters)
register(TrainState, tuple(name for name in _FIELDS if name != "layout"))


@attrs.frozen(eq=False)
class FlatState:
    """The leaves of a state in order, its structure, and who vouches for their specs."""

    leaves: list[Any]
    treedef: TreeDef
    token: object = None


def flat_of(state: TrainState) -> FlatState:
    """The flat form of a state, kept from the compiled step that made it where there is one.

    Raises:
        DonatedError: if the state was donated.
    """
    kept: FlatState | None = state.__dict__.get("_flat")
    if kept is not None:
        return kept
    return FlatState(*flatten(state))


def lazy_state(flat: FlatState) -> TrainState:
    """A state that builds its fields from ``flat`` when one is first read."""
    state = TrainState.__new__(TrainState)
    state.__dict__["_flat"] = flat
    return state


def _relate(old: TrainState, new: TrainState) -> None:
    """Remember that two records may hold the same tensors, for as long as both live."""
    kin: WeakSet[TrainState] = old.__dict__.get("_kin") or WeakSet([old])
    kin.add(new)
    old.__dict__["_kin"] = new.__dict__["_kin"] = kin


def consume(state: TrainState, reason: str, written: Iterable[Tensor] = ()) -> None:
    """Mark a state as given up: its fields are gone and say so.

    Args:
        state: the state that was donated.
        reason: what a later read says.
        written: the tensors that now hold other values; states made from this one by ``replace`` (or it from them) that
            hold one of these are given up with it.
    """
    lost = {id(leaf) for leaf in written}
    for other in list(state.__dict__.get("_kin", ())):
        if other is not state and "_consumed" not in other.__dict__ and any(id(leaf) in lost for leaf in leaves(other)):
            _give_up(other, f"it shares tensors with a state that was donated ({reason}); keep a ps.copy_state(...)")
    _give_up(state, reason)


def _give_up(state: TrainState, reason: str) -> None:
    state.__dict__.clear()
    state.__dict__["_consumed"] = reason


def copy_state(state: TrainState) -> TrainState:
    """A state of its own storage, safe to keep while the other one is donated.

    Raises:
        DonatedError: if ``state`` was donated already.
    """
    return map_leaves(torch.clone, state)  # type: ignore[no-any-return]
