"""The fold over microbatches as one loop of a traced graph.

The binary counter of ``accumulate`` becomes the loop's carry: one sum per level, moved with ``where`` by the bits of the
row's index, so that the additions are the same ones in the same order as in the unrolled form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..state.sums import Sums
from ..state.torch_private import nested_trace, scan, untraced
from ..state.tree import Tree, TreeDef, flatten, unflatten

__all__ = ["fold_rows"]

Body = Callable[[Tree, list[Tensor], list[Tensor]], tuple[Sums, list[Tensor]]]
Levels = list[list[Tensor]]


def fold_rows(
    body: Body, fixed: Tree, columns: list[Tensor], carried: list[Tensor], *, pairwise: bool
) -> tuple[list[Sums | None], list[Tensor]]:
    """Run ``body`` over the rows of ``columns`` inside the graph that is being traced.

    Args:
        body: ``(fixed, row, carried) -> (Sums, carried)``, closing over no tensor.
        fixed: what every row shares.
        columns: tensors with the rows along the first dimension.
        carried: tensors handed from row to row.
        pairwise: add in a pairwise tree, else one after the other.

    Returns:
        The binary counter after the last row, and what is carried out of it.
    """
    count = columns[0].shape[0]
    shared, shared_def = flatten(fixed)
    one, sums_def, shapes = _record_one(body, shared, shared_def, columns, carried)
    depth = count.bit_length() if pairwise else 1
    width = len(shapes)

    def loop_body(*flat: Tensor) -> tuple[Tensor, ...]:
        position, counters, rest = flat[0], flat[1 : 1 + depth * width], flat[1 + depth * width :]
        levels = [list(counters[level * width : (level + 1) * width]) for level in range(depth)]
        out = one(*rest)
        levels = _count(levels, out[:width], position) if pairwise else _add(levels, out[:width], position)
        return (position + 1, *(leaf for level in levels for leaf in level), *out[width:])

    initial = [_position(columns), *(_zeros(shape) for _ in range(depth) for shape in shapes)]
    carry = [*initial, *(_contiguous(leaf) for leaf in carried)]
    graph = nested_trace(loop_body, [*carry, *(column[0] for column in columns), *shared])
    final = scan(graph, carry, columns, shared)
    counters = final[1 : 1 + depth * width]
    stack = [
        unflatten(sums_def, counters[level * width : (level + 1) * width])
        if not pairwise or count >> level & 1
        else None
        for level in range(depth)
    ]
    return stack, final[1 + depth * width :]


def _record_one(
    body: Body, shared: list[Tensor], shared_def: TreeDef, columns: list[Tensor], carried: list[Tensor]
) -> tuple[torch.fx.GraphModule, TreeDef, list[Tensor]]:
    """One row's work as a graph of flat tensors, the structure of its sums, and their forms."""
    structure: list[TreeDef] = []

    def flat_one(*flat: Tensor) -> tuple[Tensor, ...]:
        n, m = len(carried), len(carried) + len(columns)
        part, after = body(unflatten(shared_def, flat[m:]), list(flat[n:m]), list(flat[:n]))
        leaves, treedef = flatten(part)
        structure.append(treedef)
        return tuple(_contiguous(leaf) for leaf in (*leaves, *after))

    inputs = [*carried, *(column[0] for column in columns), *shared]
    graph = nested_trace(flat_one, inputs)
    with untraced():
        out = graph(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs))
    return graph, structure[-1], list(out[: len(out) - len(carried)])


def _position(columns: list[Tensor]) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=columns[0].device)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _contiguous(leaf: Tensor) -> Tensor:
    """The leaf in the one layout that a loop's carry has, recorded whatever layout the leaf has while recording."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _count(levels: Levels, part: tuple[Tensor, ...], position: Tensor) -> Levels:
    """Add one to the binary counter: while the bit is set, merge and carry on; then put the sum down."""
    carrying, sums, out = torch.ones_like(position, dtype=torch.bool), list(part), []
    for level, held in enumerate(levels):
        bit = (position >> level & 1).to(torch.bool)
        put, merge = carrying & ~bit, carrying & bit
        out.append([torch.where(put, new, old) for new, old in zip(sums, held, strict=True)])
        sums = [torch.where(merge, old + new, new) for new, old in zip(sums, held, strict=True)]
        carrying = merge
    return out


def _add(levels: Levels, part: tuple[Tensor, ...], position: Tensor) -> Levels:
    return [[torch.where(position == 0, new, old + new) for new, old in zip(part, levels[0], strict=True)]]
