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
from .torch_private import storage_of
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

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainState:  # noqa: D102 (the arguments are those of __init__)
        record = object.__new__(cls)
        if not torch.compiler.is_dynamo_compiling():
            _living.add(record)
        return record

    def __copy__(self) -> TrainState:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return copy_state(self)

    def __reduce__(self) -> Any:
        return TrainState, tuple(getattr(self, name) for name in _FIELDS)

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
                self.__dict__["_places"] = _places(flat.leaves)
                _living.add(self)  # others may hold its tensors from now on
                return self.__dict__[name]
        raise AttributeError(f"TrainState has no attribute {name!r}")


_living: WeakSet[TrainState] = WeakSet()
"""Every state whose tensors another one may hold, which matters when one of them is donated."""

_FIELDS = tuple(field.name for field in attrs.fields(TrainState))

register(Counters)
register(TrainState, tuple(name for name in _FIELDS if name != "layout"))


@attrs.frozen(eq=False)
class FlatState:
    """The leaves of a state in order, its structure, and who vouches for their specs.

    Attributes:
        leaves: tensors.
        treedef: structure.
        token: of the compiled step that knows the form of these leaves.
        storages: addresses of the leaves' memory, where the leaves may be donated.
        exclusive: whether no other record holds these leaves, as long as nobody reads a field.
        inputs: what a compiled step takes in their place: the leaves, or flat tensors of which they are views.
    """

    leaves: list[Any]
    treedef: TreeDef
    token: object = None
    storages: frozenset[int] = frozenset()
    exclusive: bool = False
    inputs: list[Any] = attrs.field(default=attrs.Factory(lambda self: self.leaves, takes_self=True))


def flat_of(state: TrainState) -> FlatState:
    """The flat form of a state, kept from the compiled step that made it where there is one and it still holds.

    Raises:
        DonatedError: if the state was donated.
    """
    kept: FlatState | None = state.__dict__.get("_flat")
    if kept is None:
        return FlatState(*flatten(state))
    if not _was_read(state):
        return kept
    # The fields were read since: somebody may have put another tensor into a dict, or other memory under a tensor.
    values, treedef = flatten(state)
    same = treedef == kept.treedef and all(a is b for a, b in zip(values, kept.leaves, strict=True))
    return kept if same and _places(values) == state.__dict__.get("_places") else FlatState(values, treedef)


def _places(leaves: list[Tensor]) -> list[Any]:
    """Where and how each leaf lies in memory."""
    return [(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]


def lazy_state(flat: FlatState) -> TrainState:
    """A state that builds its fields from ``flat`` when one is first read."""
    state: TrainState = object.__new__(TrainState)
    state.__dict__["_flat"] = flat
    if not flat.exclusive:
        _living.add(state)
    return state


def consume(state: TrainState, reason: str, written: Iterable[Tensor] = ()) -> None:
    """Mark a state as given up: its fields are gone and say so.

    Args:
        state: the state that was donated.
        reason: what a later read says.
        written: the tensors that now hold other values; every other state that holds one of these is given up as well.
    """
    flat: FlatState | None = state.__dict__.get("_flat")
    exclusive = flat is not None and flat.exclusive and not _was_read(state)
    _give_up(state, reason)
    if exclusive:
        return
    lost = {storage_of(leaf) for leaf in written}
    for other in list(_living):
        if _is_whole(other) and _shares(other, lost):
            _give_up(other, f"it shares tensors with a state that was donated ({reason}); keep a ps.copy_state(...)")


def _shares(state: TrainState, storages: set[int | None]) -> bool:
    return any(isinstance(leaf, Tensor) and storage_of(leaf) in storages for leaf in flat_of(state).leaves)


def _was_read(state: TrainState) -> bool:
    return _FIELDS[-1] in state.__dict__


def _is_whole(state: TrainState) -> bool:
    """Whether a state holds leaves: it was not given up, and no other thread is about to fill it."""
    return "_flat" in state.__dict__ or _was_read(state)


def _give_up(state: TrainState, reason: str) -> None:
    state.__dict__.clear()
    state.__dict__["_consumed"] = reason


def copy_state(state: TrainState) -> TrainState:
    """A state of its own storage, safe to keep while the other one is donated.

    Raises:
        DonatedError: if ``state`` was donated already.
    """
    return map_leaves(torch.clone, state)  # type: ignore[no-any-return]
