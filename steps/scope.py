"""Scopes: the concerns by name in torch's profiler, where an eager step runs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from ..state.torch_private import is_profiling, is_tracing

__all__ = ["PREFIX", "name_of", "scope"]

PREFIX = "purestep: "

_NOTHING = contextlib.nullcontext()


def scope(name: str) -> AbstractContextManager[object]:
    """A context whose time the profiler shows as that of a concern; nothing while none runs, or a graph is recorded.

    Args:
        name: of the concern, in lower case.
    """
    if torch.compiler.is_compiling() or is_tracing() or not is_profiling():
        return _NOTHING
    return torch.profiler.record_function(PREFIX + name)


def name_of(concern: object) -> str:
    """What a concern is called in a line: a user's function by its own name, ours by the file that holds it."""
    name = getattr(concern, "name", None)
    return name if isinstance(name, str) else type(concern).__module__.rpartition(".")[2]
