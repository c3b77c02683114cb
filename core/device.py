"""What the core knows of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from ..state.sums import Sums
from ..state.tree import Tree

__all__ = ["Device"]


@runtime_checkable
class Device(Protocol):
    """Where a step runs. It is handed in; the core imports none.

    Attributes:
        name: for messages and tables.
        rank: this process's number, from 0.
        world: how many processes there are.
        synchronous: whether reading a result costs no wait, so that a call may raise on a value.
        traceable: whether ``reduce`` may be recorded into the graph; else it runs between two compiled halves.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (documented as attributes above)

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def world(self) -> int: ...  # noqa: D102

    @property
    def synchronous(self) -> bool: ...  # noqa: D102

    @property
    def traceable(self) -> bool: ...  # noqa: D102

    def place(self, tree: Tree) -> Tree:
        """The tree with its tensors where this device computes."""
        ...

    def reduce(self, sums: Sums) -> Sums:
        """The sums over all processes, the same on each."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """The time of a step: settings of the machine, put back at its end."""
        ...
