"""The form of a tree: what must not change about it over a step, and what did, in words."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from .tree import Tree, leaves_with_paths, map_leaves

__all__ = ["LeafSpec", "difference", "spec"]


@attrs.frozen
class LeafSpec:
    """What must not change about a leaf over a step."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


def spec(tree: Tree) -> Tree:
    """The tree with each tensor replaced by its :class:`LeafSpec`; other leaves stay.

    Example:
        >>> str(spec(torch.zeros(2, 3)))
        'float32[2, 3] on cpu'
    """

    def of(leaf: Any) -> Any:
        return LeafSpec(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

    return map_leaves(of, tree)


def difference(before: Tree, after: Tree, root: str = "") -> str | None:
    """The first difference in structure or leaf spec, in words with the leaf's path; ``None`` if there is none.

    Example:
        >>> difference({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "params")
        "params['w'] was float32[2] on cpu and is now float32[3] on cpu"
    """
    old, new = (dict(leaves_with_paths(tree, root)) for tree in (before, after))
    gone = [path for path in old if path not in new]
    extra = [path for path in new if path not in old]
    if gone or extra:
        return "; ".join(
            f"{word} {', '.join(paths)}" for word, paths in (("missing", gone), ("unexpected", extra)) if paths
        )
    for path, value in old.items():
        was, now = spec(value), spec(new[path])
        if isinstance(was, LeafSpec) != isinstance(now, LeafSpec):
            return f"{path} was {was} and is now {now!r}: a Python value where a tensor is needed"
        if was != now:
            return f"{path} was {was} and is now {now}"
    return None
