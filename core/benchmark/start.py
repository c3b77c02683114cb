"""The time to the first step: with nothing compiled, and with what an earlier process left on the disk."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from ...state.record import TrainState, copy_state
from ...state.torch_private import compile_cache_in
from ..jitted import Jitted

__all__ = ["first_steps"]


def first_steps(fast: Jitted, state: TrainState, batch: Any) -> tuple[float, float]:
    """Seconds to the first step, cold and with a warm cache on the disk; imports are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        return _first_step(fast, state, batch, Path(folder)), _first_step(fast, state, batch, Path(folder))


def _first_step(fast: Jitted, state: TrainState, batch: Any, folder: Path) -> float:
    fresh = Jitted(fast.step, fast.device, donate=fast.donate, backend=fast.backend)
    own = copy_state(state)
    with compile_cache_in(folder):
        start = time.perf_counter()
        fresh(own, batch)
        return time.perf_counter() - start
