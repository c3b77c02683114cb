"""Packing: small leaves of a donated state live side by side in a few flat tensors.

A compiled step then takes one input where it took hundreds, and an optimizer moves them all in one loop. The record keeps
its leaves: they are views. Large leaves stay as they are, so that packing never doubles the memory of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from ...state.small import in_order, is_small

__all__ = ["Group", "Packing", "plan"]

_FEWEST = 4  # leaves; fewer gain nothing


@attrs.frozen
class Group:
    """Leaves that share a flat tensor.

    Attributes:
        members: their indices among the state's leaves, in the order in which they lie.
        shapes: of each.
        offsets: where each begins, in elements.
        length: of the flat tensor, in elements.
        dtype: of all.
        device: of all.
    """

    members: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    length: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, members: Sequence[int], leaves: Sequence[Tensor]) -> Group:
        """The group of some leaves, in this order."""
        own = [leaves[i] for i in members]
        ends = list(accumulate(leaf.numel() for leaf in own))
        shapes = tuple(leaf.shape for leaf in own)
        return cls(tuple(members), shapes, (0, *ends[:-1]), ends[-1], own[0].dtype, own[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The members inside a flat tensor."""
        return [
            flat[start : start + shape.numel()].view(shape)
            for start, shape in zip(self.offsets, self.shapes, strict=True)
        ]


@attrs.frozen
class Packing:
    """How the leaves of a state become the inputs of a program: first those by themselves, then the flat tensors.

    Attributes:
        alone: indices of the leaves that stay as they are.
        groups: the others.
    """

    alone: tuple[int, ...]
    groups: tuple[Group, ...] = ()

    def pack(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves as views of flat tensors of their own, and the inputs."""
        packed = list(leaves)
        inputs = [leaves[i] for i in self.alone]
        for group in self.groups:
            flat = torch.empty(group.length, dtype=group.dtype, device=group.device)
            for i, view in zip(group.members, group.views(flat), strict=True):
                packed[i] = view.copy_(leaves[i])
            inputs.append(flat)
        return packed, inputs


def plan(leaves: Sequence[Tensor], paths: Sequence[tuple[Any, ...]], changed: Iterable[int]) -> Packing:
    """Which leaves of a state to pack: the small ones that a step changes, with their siblings of one dtype.

    Args:
        leaves: of the state.
        paths: of each leaf; siblings have all but the last part in common.
        changed: indices of the leaves that the step computes anew.
    """
    families: dict[Any, list[int]] = {}
    for i in changed:
        leaf = leaves[i]
        if leaf.dim() and is_small(leaf) and leaf.is_contiguous():
            families.setdefault((paths[i][:-1], leaf.dtype, leaf.device), []).append(i)
    groups = [
        Group.of([members[k] for k in in_order([leaves[i] for i in members])], leaves)
        for members in families.values()
        if len(members) >= _FEWEST
    ]
    packed = {i for group in groups for i in group.members}
    return Packing(tuple(i for i in range(len(leaves)) if i not in packed), tuple(groups))
