"""What is done to a traced graph between its recording and Inductor: one file for each rewriting."""

from __future__ import annotations

from torch import fx

from .lift import lift_elementwise
from .numbers import compute_numbers_once

__all__ = ["rewrite"]


def rewrite(graph: fx.Graph) -> None:
    """What Inductor does with a graph of ours once its writes are functional, before it makes loops of it."""
    compute_numbers_once(graph)
    lift_elementwise(graph)
