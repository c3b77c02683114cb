"""What lies around a step and must not move: generators, flags, the environment, the module's own template."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...state.tree import leaves, map_leaves
from ..closures import held
from ..compose import Step
from .difference import first_difference

__all__ = ["GENERATOR", "changed", "disturb", "snapshot", "world"]


GENERATOR = "draw from the step's key: ps.uniform(key, shape), or torch's own random operations inside the loss"
"""What to do about a global generator."""


def world(step: Step) -> dict[str, Any]:
    """Everything outside of state and batch that code may touch, by name."""
    numbers: Any = np.random.get_state()
    found = {
        "torch's global generator": torch.random.get_rng_state().clone(),
        "numpy's global generator": torch.from_numpy(np.asarray(numbers[1]).astype(np.int64)),
        "numpy's place in its generator": numbers[2],
        "python's global generator": repr(random.getstate()),
        "os.environ": dict(os.environ),
        "grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the matmul precision": torch.get_float32_matmul_precision(),
    }
    found.update({f"{name}, which the step's functions hold": value for name, value in _python_values(step)})
    for phase in step.phases:
        if phase.forward.template is not None:
            module = phase.forward.template.module
            found["the modes of the module"] = {name: part.training for name, part in module.named_modules()}
            found["the attributes of the module"] = {name: sorted(vars(part)) for name, part in module.named_modules()}
            found["a tensor that the module holds"] = snapshot(phase.forward.template.constants)
    return found


_SIMPLE = (bool, int, float, str, tuple, itertools.count)


def _python_values(step: Step) -> Iterator[tuple[str, Any]]:
    """Plain values that the step's functions close over, and the sizes of lists and dicts."""
    for name, value in held(step):
        if isinstance(value, _SIMPLE):
            yield name, repr(value)
        elif isinstance(value, (list, dict, set)):
            yield name, len(value)


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The name of the first thing that moved."""
    for name, value in before.items():
        if first_difference({"x": value}, {"x": after.get(name)}) is not None:
            return name
    return None


def snapshot(tree: Any) -> Any:
    """The tree with copies of its tensors."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def disturb(seed: int, like: Any = ()) -> None:
    """Move everything that must not matter: the global generators, and what freed memory holds."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    sizes = [leaf.shape for leaf in leaves(like) if isinstance(leaf, Tensor)]
    rubbish = [torch.full(shape, float("nan")) for shape in sizes for _ in range(3)]
    del rubbish
