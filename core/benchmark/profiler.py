"""Torch's profiler around a call on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["profiled"]


def profiled(call: Callable[[], Any], *, memory: bool = False) -> torch.profiler.profile:
    """What the profiler saw of a call, and with ``memory`` of the allocator during it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=memory)
    with _quiet(), profile:
        kept = call()
    del kept
    return profile


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler announces its start and end on the error stream of the process, past ``sys.stderr``."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
