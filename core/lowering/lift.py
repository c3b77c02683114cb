"""Lift: the same arithmetic on many small tensors becomes one arithmetic on all of them side by side.

Where a graph puts tensors side by side (``cat`` of flattened parts), and each part is the result of the same operation, the
operands are put side by side instead, and so on upwards: ``cat(f(a), f(b))`` is ``f(cat(a, b))`` for a function of the
elements. What is left at the top are the gradients, each written to its place, and the flat tensors that the leaves are
views of. An optimizer over hundreds of leaves is one loop then, in the machine code and for the compiler alike.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ...state.torch_private import is_elementwise, keeps_elements
from .flat_inputs import call

__all__ = ["lift_elementwise"]

aten = torch.ops.aten

Node: TypeAlias = Any  # an fx.Node: its arguments are typed as all that an argument may be
Row = tuple[Node, ...]


def lift_elementwise(graph: fx.Graph) -> None:
    """Rewrite every ``cat`` of two or more flattened parts whose parts are computed alike."""
    known: dict[Row, Node] = {}
    for node in list(graph.nodes):
        row = _flattened_parts(node)
        if row is None:
            continue
        with graph.inserting_before(node):
            lifted = _Lift(graph, known).row(row)
        if lifted is not node:
            node.replace_all_uses_with(lifted)
            graph.erase_node(node)
    graph.eliminate_dead_code()


class _Lift:
    """One ``cat`` on its way up, new nodes going where the graph inserts; rows that are known already are used again."""

    def __init__(self, graph: fx.Graph, known: dict[Row, Node]) -> None:
        self.graph, self.known = graph, known

    def row(self, row: Row) -> Node:
        """One node with the values of all of ``row`` side by side."""
        row = tuple(_unviewed(node) for node in row)
        if row not in self.known:
            self.known[row] = _whole(row) or self._same_operation(row) or self._side_by_side(row)
        return self.known[row]

    def _same_operation(self, row: Row) -> Node | None:
        first = row[0]
        if not is_elementwise(first.target) or any(not _alike(first, other) for other in row[1:]):
            return None
        columns = [[node.args[index] for node in row] for index in range(len(first.args))]
        lifted = [not _is_shared(column) for column in columns]
        if not any(lifted) or not all(_lines_up(c, row) for c, own in zip(columns, lifted, strict=True) if own):
            return None
        args = [self.row(tuple(c)) if own else c[0] for c, own in zip(columns, lifted, strict=True)]
        return call(self.graph, first.target, *args, **first.kwargs)

    def _side_by_side(self, row: Row) -> Node:
        parts = [call(self.graph, aten.reshape.default, node, [-1]) for node in row]
        return call(self.graph, aten.cat.default, parts)


def _flattened_parts(node: Node) -> Row | None:
    if node.target is not aten.cat.default or (len(node.args) > 1 and node.args[1] != 0):
        return None
    parts = node.args[0]
    if len(parts) < 2 or any(part.meta["val"].dim() != 1 for part in parts):
        return None
    return tuple(parts)


def _unviewed(node: Node) -> Node:
    """What a flattened tensor was before: the same elements in the same order."""
    while keeps_elements(node.target):
        node = node.args[0]
    return node


def _alike(one: Node, other: Node) -> bool:
    """The same operation with the same options, giving the same dtype."""
    return (
        one.target is other.target
        and repr(one.kwargs) == repr(other.kwargs)
        and len(one.args) == len(other.args)
        and one.meta["val"].dtype == other.meta["val"].dtype
    )


def _is_shared(column: list[Any]) -> bool:
    """An argument that is the same for all: a constant, or a number of the graph. Told by words: -0.0 equals 0.0."""
    first = column[0]
    if isinstance(first, fx.Node):
        return first.meta["val"].dim() == 0 and all(arg is first for arg in column)
    return all(type(arg) is type(first) and repr(arg) == repr(first) for arg in column)


def _lines_up(column: list[Any], row: Row) -> bool:
    """Whether operands have an element for each of the results', all of one dtype: nothing is broadcast or promoted."""
    values: list[Any] = [part.meta.get("val") if isinstance(part, fx.Node) else None for part in column]
    return all(
        isinstance(value, Tensor)
        and value.dim() > 0
        and value.shape == node.meta["val"].shape
        and value.dtype == values[0].dtype
        for value, node in zip(values, row, strict=True)
    )


def _whole(row: Row) -> Node | None:
    """The flat tensor of which a row is all the parts, in order and without gaps."""
    flat: Node = row[0].args[0] if row[0].args else None
    place = 0
    for node in row:
        if node.target is not aten.slice.Tensor or node.args[0] is not flat or node.args[1:3] != (0, place):
            return None
        if flat.meta["val"].dim() != 1 or len(node.args) != _SLICED:
            return None
        place = min(node.args[3], flat.meta["val"].shape[0])
    return flat if place == flat.meta["val"].shape[0] else None


_SLICED = 4  # tensor, dimension, start, end; a fifth would be a stride
