"""Numbers: what an update computes once stays out of the loops over its leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ...state.torch_private import is_operation, once_operation, schema

__all__ = ["compute_numbers_once"]


def compute_numbers_once(graph: fx.Graph) -> None:
    """Keep the numbers of an update (a rate, a clipping factor, a correction) out of the loops over elements.

    Inductor inlines a 0-d intermediate into every kernel that reads it: hundreds of leaves would each compute the powers
    and roots of Adam's corrections again, and the compiler would have to read them hundreds of times. Equal numbers
    become one, and one that several tensors read is stored and loaded.
    """
    once = once_operation()
    if once is None:
        return
    _merge_equal_numbers(graph)
    for node in list(_numbers(graph)):
        readers = [user for user in node.users if _is_wide(user)]
        if len(readers) < 2 or not _depends_on_input(node):
            continue
        with graph.inserting_after(node):
            stored = graph.call_function(once, (node,))
        stored.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, stored)


def _merge_equal_numbers(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(_numbers(graph)):
        # In words, which name a node by its own name: as keys 1, 1.0 and True are equal, and so are the zeros.
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _numbers(graph: fx.Graph) -> Iterator[fx.Node]:
    """The 0-d results of operations that write nowhere (the writes into donated leaves are what is left of those)."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dim():
            continue
        if is_operation(node.target) and not schema(node.target).is_mutable:
            yield node


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and value.dim() > 0


def _depends_on_input(node: fx.Node) -> bool:
    """Whether a number can change between calls; constants are folded, and better inlined."""
    seen, waiting = {node}, [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before.op in ("placeholder", "get_attr"):
                return True
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return False
