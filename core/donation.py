"""Donation: whether a state's tensors may be written into, and how they lie while they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.errors import BatchError, StateError
from ..state.layout import byte_reach
from ..state.record import FlatState
from ..state.tree import TreeDef
from .lowering.packing import Packing

__all__ = ["own_storages", "packed", "refuse_lent"]


def own_storages(flat: FlatState) -> frozenset[int]:
    """The memory of the leaves; two leaves over the same bytes cannot both be written in place.

    Raises:
        StateError: naming both.
    """
    spans = sorted(
        (leaf.data_ptr(), leaf.data_ptr() + byte_reach(leaf), index)
        for index, leaf in enumerate(flat.leaves)
        if leaf.numel()
    )
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            first, second = (flat.treedef.accessors()[i].codify("state") for i in sorted((one, other)))
            raise StateError(
                f"{first} and {second} share memory, so the state cannot be donated; give each a tensor of its own, as "
                "ps.copy_state(state) does"
            )
    return frozenset(leaf.untyped_storage().data_ptr() for leaf in flat.leaves if leaf.numel())


def refuse_lent(flat: FlatState, values: list[Any], treedef: TreeDef) -> None:
    """A batch that is a view of the donated state would change while it is read.

    Raises:
        BatchError: naming its leaf.
    """
    for index, leaf in enumerate(values):
        if (
            isinstance(leaf, Tensor)
            and leaf.layout == torch.strided
            and leaf.untyped_storage().data_ptr() in flat.storages
        ):
            path = treedef.accessors()[index].codify("batch")
            raise BatchError(f"{path} shares its storage with the state that is donated; hand in a clone")


def packed(flat: FlatState, packing: Packing | None) -> FlatState:
    """The state with its small leaves side by side, in memory of their own; itself where they lie so already."""
    if packing is None or flat.inputs is not flat.leaves:
        return flat
    leaves, inputs = packing.pack(flat.leaves)
    storages = frozenset(leaf.untyped_storage().data_ptr() for leaf in inputs if leaf.numel())
    return attrs.evolve(flat, leaves=leaves, inputs=inputs, storages=storages)
