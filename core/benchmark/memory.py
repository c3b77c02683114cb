"""Memory of a step: what torch's allocator gives out at most while it runs, as the profiler records it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from ...state.torch_private import memory_events
from .profiler import profiled

__all__ = ["peak_bytes"]


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at a time beyond what was held before it; memory outside of torch is not seen.

    Example:
        >>> peak_bytes(lambda: torch.ones(1000) + torch.ones(1000)) >= 12000
        True
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    return max(accumulate(memory_events(profiled(call, memory=True)), initial=0))
