"""A guard around functions of the user's own: what they are given they may read, not write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..state.errors import PurityError
from ..state.torch_private import is_tracing, schema, storage_of
from ..state.tree import Tree, leaves, leaves_with_paths

__all__ = ["Guard"]


class Guard:
    """The tensors that no operation may write into, with their paths.

    Args:
        **given: trees by the name that a message gives them.
    """

    def __init__(self, **given: Tree) -> None:
        self._given: dict[str, Tree] = {}
        self._watched: dict[str, Tree] = {}
        self._before: list[tuple[Tensor, Tensor | None, int | None]] = []
        self._paths: dict[int, str] | None = None
        self.add(**given)

    def add(self, **given: Tree) -> None:
        """Guard these trees as well."""
        self._given.update(given)
        self._paths = None
        self.watch(**given)

    def watch(self, **trees: Tree) -> None:
        """Let operations write into these tensors, but nobody exchange what lies under them, as ``x.data = y`` does."""
        if torch.compiler.is_dynamo_compiling():
            return
        self._watched.update(trees)
        for leaf in (leaf for tree in trees.values() for leaf in leaves(tree)):
            if isinstance(leaf, Tensor):
                self._before.append((leaf, None if is_tracing() else leaf.detach(), storage_of(leaf)))

    def release(self) -> None:
        """Look whether anything was exchanged, which no operation shows; put it back.

        Raises:
            PurityError: naming the tensor.
        """
        exchanged = [(leaf, kept) for leaf, kept, storage in self._before if storage_of(leaf) != storage]
        for leaf, kept in exchanged:
            if kept is not None:
                leaf.data = kept
        for root, tree in self._watched.items():
            for path, leaf in leaves_with_paths(tree, root):
                if any(leaf is other for other, _ in exchanged):
                    raise PurityError(
                        f"{path}.data was assigned, which cannot be traced and changes what was given; make a new tensor, "
                        "or write into a buffer with copy_()"
                    )

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operation that writes into what is guarded.

        Raises:
            PurityError: naming the operation and the leaf.
        """
        for target in _targets(func, args, kwargs):
            path = self._known().get(storage_of(target) or 0)
            if path is not None:
                raise PurityError(
                    f"{func} writes into {path} in place, and a step changes nothing that it is given. Use the form of the "
                    "operation that returns a new tensor, or work on a clone; params are changed after ps.step, by a "
                    "function that returns state.replace(params=...)"
                )

    def _known(self) -> dict[int, str]:
        """Built at the first write: most functions never write in place."""
        if self._paths is None:
            self._paths = {}
            for root, tree in self._given.items():
                for path, leaf in leaves_with_paths(tree, root):
                    storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
                    if storage is not None:
                        self._paths.setdefault(storage, path)
        return self._paths


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes into, by its schema."""
    for index, argument in enumerate(schema(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor))
