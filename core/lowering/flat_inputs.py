"""The inputs of a traced graph packed: flat tensors in, views of them where the graph read leaves, one write each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ...state.torch_private import is_operation
from .packing import Packing

__all__ = ["call", "pack_inputs"]

aten = torch.ops.aten

Node: TypeAlias = Any  # an fx.Node: its arguments are typed as all that an argument may be


def pack_inputs(graph: fx.GraphModule, fakes: Sequence[Tensor], packing: Packing, mode: Any) -> list[Tensor]:
    """Rewrite a graph over ``(*leaves, *batch)`` into one over ``(*leaves alone, *flat tensors, *batch)``.

    Args:
        graph: of a donated step: it writes the new leaves into the old ones at its end.
        fakes: the fake tensors it was recorded with.
        packing: of the state's leaves.
        mode: the fake mode.

    Returns:
        The fake tensors of the new inputs.
    """
    count = len(packing.alone) + sum(len(group.members) for group in packing.groups)
    places: list[Node] = [node for node in graph.graph.nodes if node.op == "placeholder"]
    writes: dict[Node, Node] = {node.args[0]: node for node in graph.graph.nodes if node.target is aten.copy_.default}
    inputs = [fakes[i] for i in packing.alone]
    with mode:
        for number, group in enumerate(packing.groups):
            with graph.graph.inserting_before(places[count] if count < len(places) else places[-1].next):
                flat = graph.graph.placeholder(f"flat_{number}")
            flat.meta["val"] = torch.empty(group.length, dtype=group.dtype, device=group.device)
            inputs.append(flat.meta["val"])
            members = [places[i] for i in group.members]
            views = _read_views(graph.graph, flat, members, group.offsets, writes)
            _write_once(graph.graph, flat, members, views, writes)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [*inputs, *fakes[count:]]


def _read_views(
    graph: fx.Graph, flat: Node, members: list[Node], offsets: Sequence[int], writes: dict[Node, Node]
) -> list[Node]:
    """Views of the flat tensor in the leaves' place."""
    views = []
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for place, start in zip(members, offsets, strict=True):
            leaf = place.meta["val"]
            part = call(graph, aten.slice.Tensor, flat, 0, start, start + leaf.numel())
            view = call(graph, aten.view.default, part, list(leaf.shape))
            views.append(view)
            write = writes.get(place)
            for user in list(place.users):
                if user is not write:
                    user.replace_input_with(place, view)
            _apart_for_loops(graph, view)
    return views


def _apart_for_loops(graph: fx.Graph, view: Node) -> None:
    """A loop over microbatches takes no two inputs that share memory: it gets a copy, made once per update."""
    loops = [user for user in view.users if not is_operation(user.target)]
    if loops:
        copy = call(graph, aten.clone.default, view)
        for loop in loops:
            loop.replace_input_with(view, copy)


def _write_once(
    graph: fx.Graph,
    flat: Node,
    members: list[Node],
    views: list[Node],
    writes: dict[Node, Node],
) -> None:
    """The new leaves side by side into the flat tensor, in place of a write into each."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        parts = []
        for place, view in zip(members, views, strict=True):
            new = writes[place].args[1] if place in writes else view
            parts.append(call(graph, aten.reshape.default, new, [-1]))
        call(graph, aten.copy_.default, flat, call(graph, aten.cat.default, parts))
    for place in members:
        if place in writes:
            graph.erase_node(writes[place])
        graph.erase_node(place)


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A node with its fake value."""
    node = graph.call_function(target, args, kwargs)
    value = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*value[0], **value[1])
    return node
