"""The processor of this machine, one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import attrs
import torch
from torch import Tensor

from ..state.errors import BatchError
from ..state.sums import Sums
from ..state.tree import Tree, as_tensors, flatten

__all__ = ["Cpu", "cpu"]


def cpu(threads: int | None = None) -> Cpu:
    """The CPU as a device.

    Args:
        threads: how many threads a step computes with; torch's present setting by default. The bits of a result depend
            on it.

    Raises:
        ValueError: if ``threads`` is not a positive int.

    Example:
        >>> cpu().place({"x": torch.ones(2)})
        {'x': tensor([1., 1.])}
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be a positive int, got {threads!r}")
    return Cpu(threads)


@attrs.frozen
class Cpu:
    """One process on the CPU; see :func:`cpu`."""

    threads: int | None = None
    name: str = attrs.field(default="cpu", init=False)
    rank: int = attrs.field(default=0, init=False)
    world: int = attrs.field(default=1, init=False)
    synchronous: bool = attrs.field(default=True, init=False)
    traceable: bool = attrs.field(default=True, init=False)

    def place(self, tree: Tree) -> Tree:
        """The tree with its arrays as tensors here; a tensor that lies elsewhere is refused, never moved in silence.

        Raises:
            BatchError: naming the leaf that lies on another device.
        """
        placed = as_tensors(tree)
        values, treedef = flatten(placed)
        for index, leaf in enumerate(values):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                path = treedef.accessors()[index].codify("batch")
                raise BatchError(f"{path} lies on {leaf.device}, the step runs on cpu; move it with .to('cpu')")
        return placed

    def reduce(self, sums: Sums) -> Sums:
        """The sums themselves: there is one process."""
        return sums

    def running(self) -> AbstractContextManager[None]:
        """The time of a step: torch computes with this device's threads, and with its former setting afterwards."""
        return _AS_IT_IS if self.threads in (None, torch.get_num_threads()) else _threads(self.threads)


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
