"""Words for trees of tensors.

A tree is any nesting of dict, list, tuple, named tuple, ``None``, attrs and dataclass records; its leaves are tensors
(in a batch also numbers, strings and whatever else a loader yields). ``None`` stands for an absent leaf: a map skips it,
so a gradient tree with ``None`` where a parameter is frozen or unused lines up with the full tree of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import attrs
import numpy as np
import optree
import torch
from torch import Tensor

from .errors import BatchError

__all__ = [
    "Tree",
    "TreeDef",
    "as_tensors",
    "fill",
    "flatten",
    "leaves",
    "leaves_with_paths",
    "map_leaves",
    "map_leaves_to",
    "own_containers",
    "register",
    "unflatten",
]

Tree: TypeAlias = Any
TreeDef: TypeAlias = optree.PyTreeSpec

NAMESPACE = "purestep"
_registered: set[type] = set()


def register(cls: type, fields: tuple[str, ...] | None = None) -> type:
    """Make an attrs or dataclass record a node of our trees; returns ``cls``.

    Args:
        cls: the record's class.
        fields: names of the fields that are children; all by default. The others are kept as static data.
    """
    if cls not in _registered:
        every = tuple(field.name for field in _fields(cls))
        make: Any = cls.__new__
        children = every if fields is None else fields
        static = tuple(name for name in every if name not in children)

        def take_apart(record: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
            return tuple(getattr(record, n) for n in children), tuple(getattr(record, n) for n in static), children

        def put_together(static_values: Any, child_values: Iterable[Any]) -> Any:
            # Not through __init__: a record is rebuilt around other leaves (shapes, names, placeholders), and what its
            # constructor checks or derives was already checked and derived.
            record = make(cls)
            for name, value in zip(children + static, (*child_values, *static_values), strict=True):
                object.__setattr__(record, name, value)
            return record

        optree.register_pytree_node(
            cls, take_apart, put_together, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE
        )
        _registered.add(cls)
    return cls


def _fields(cls: type) -> tuple[Any, ...]:
    return attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls)


def _is_record(value: Any) -> bool:
    return not isinstance(value, (Tensor, type)) and (attrs.has(type(value)) or dataclasses.is_dataclass(value))


def flatten(tree: Tree, *, none_is_leaf: bool = False) -> tuple[list[Any], TreeDef]:
    """Leaves in a fixed order (dicts by sorted key) and the structure; ``None`` is structure unless asked otherwise.

    Example:
        >>> values, treedef = flatten({"b": 2, "a": (1, None)})
        >>> values
        [1, 2]
        >>> unflatten(treedef, [10, 20])
        {'b': 20, 'a': (10, None)}
    """
    while True:
        values, treedef = optree.tree_flatten(tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
        unknown = {type(value) for value in values if _is_record(value)}
        if not unknown:
            return values, treedef
        for cls in unknown:
            register(cls)


def unflatten(treedef: TreeDef, values: Iterable[Any]) -> Tree:
    """The tree of structure ``treedef`` with these leaves: the inverse of :func:`flatten`."""
    return optree.tree_unflatten(treedef, values)


def leaves(tree: Tree) -> list[Any]:
    """The leaves that are present, in the order of :func:`flatten`.

    Example:
        >>> leaves([1, None, {"x": 2}])
        [1, 2]
    """
    return flatten(tree)[0]


def leaves_with_paths(tree: Tree, root: str = "") -> list[tuple[str, Any]]:
    """The present leaves, each with its path written as the Python expression that reaches it from ``root``.

    Example:
        >>> leaves_with_paths({"w": 1, "layers": [2]}, "params")
        [("params['layers'][0]", 2), ("params['w']", 1)]
    """
    values, treedef = flatten(tree)
    return list(zip((path.codify(root) for path in treedef.accessors()), values, strict=True))


def map_leaves(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """``fn`` over the leaves of trees of one structure; where any of them is absent (``None``), so is the result.

    Raises:
        ValueError: if the structures differ.

    Example:
        >>> map_leaves(lambda g, p: g + p, {"w": 1, "frozen": None}, {"w": 10, "frozen": 20})
        {'w': 11, 'frozen': None}
    """

    def present(*values: Any) -> Any:
        return None if any(value is None for value in values) else fn(*values)

    values, treedef = flatten(tree, none_is_leaf=True)
    others = [_aligned(other, treedef) for other in rest]
    return unflatten(treedef, [present(*row) for row in zip(values, *others, strict=True)])


def map_leaves_to(count: int, fn: Callable[..., tuple[Any, ...]], tree: Tree, *rest: Tree) -> tuple[Tree, ...]:
    """Like :func:`map_leaves` for a ``fn`` that returns ``count`` values: gives ``count`` trees.

    Example:
        >>> map_leaves_to(2, lambda g, m: (g + m, g), {"w": 1}, {"w": 10})
        ({'w': 11}, {'w': 1})
    """
    values, treedef = flatten(tree, none_is_leaf=True)
    others = [_aligned(other, treedef) for other in rest]
    absent = (None,) * count
    rows = [absent if any(v is None for v in row) else fn(*row) for row in zip(values, *others, strict=True)]
    return tuple(unflatten(treedef, [row[i] for row in rows]) for i in range(count))


def fill(tree: Tree, default: Tree) -> Tree:
    """``tree`` with its absent leaves taken from ``default``.

    Example:
        >>> fill({"w": 1, "frozen": None}, {"w": 10, "frozen": 20})
        {'w': 1, 'frozen': 20}
    """
    values, treedef = flatten(tree, none_is_leaf=True)
    pairs = zip(values, _aligned(default, treedef), strict=True)
    return unflatten(treedef, [other if value is None else value for value, other in pairs])


def own_containers(tree: Tree) -> Tree:
    """The same leaves in dicts, lists and records of their own, which may be rearranged.

    Example:
        >>> given = {"w": 1}
        >>> own_containers(given).update(w=2), given
        (None, {'w': 1})
    """
    if torch.compiler.is_dynamo_compiling():
        return tree
    values, treedef = flatten(tree)
    return unflatten(treedef, values)


def as_tensors(batch: Tree) -> Tree:
    """The batch with NumPy arrays and scalars as tensors; the batch itself where there are none.

    Raises:
        BatchError: naming an array of a dtype that torch does not have.

    Example:
        >>> as_tensors({"x": np.arange(3)})
        {'x': tensor([0, 1, 2])}
    """
    values, treedef = flatten(batch)
    if not any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in values):
        return batch
    for index, leaf in enumerate(values):
        if isinstance(leaf, (np.ndarray, np.generic)):
            try:
                values[index] = _from_numpy(leaf)
            except (TypeError, ValueError) as error:
                path = treedef.accessors()[index].codify("batch")
                raise BatchError(
                    f"{path} is a NumPy array of dtype {leaf.dtype}, which is no tensor: {error}"
                ) from error
    return unflatten(treedef, values)


def _from_numpy(leaf: Any) -> Tensor:
    array = np.asarray(leaf)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else array.copy())


def _aligned(tree: Tree, treedef: TreeDef) -> list[Any]:
    values, other = flatten(tree, none_is_leaf=True)
    if other != treedef:
        raise ValueError(f"trees of different structure: {treedef} and {other}")
    return values
