"""Out of a state and back: the dictionary that ``Module.load_state_dict`` takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .errors import StateError
from .record import TrainState
from .spec import difference
from .tree import flatten, leaves_with_paths, unflatten

__all__ = ["load_state_dict", "state_dict"]


def state_dict(state: TrainState) -> dict[str, Tensor]:
    """Copies of params and buffers under every name the module knows them by.

    Args:
        state: of a run that started from a module, or from a plain tree; then the names are the leaves' paths.

    Returns:
        What ``module.load_state_dict`` takes, strict.

    Raises:
        DonatedError: if the state was donated.
    """
    if not state.layout.module:
        return {path: leaf.clone() for path, leaf in leaves_with_paths(state.params, "params")}
    named = {name: leaf.clone() for name, leaf in {**state.params, **state.buffers}.items()}
    named.update({name: named[leaf] for name, leaf in state.layout.aliases})
    return {name: leaf for name, leaf in named.items() if name not in state.layout.transient}


def load_state_dict(state: TrainState, values: Mapping[str, Tensor]) -> TrainState:
    """A new state whose params and buffers are copies of ``values``; all else is kept.

    Tied weights stay one leaf: their names must agree. Optimizer state is keyed by the same names and stays with them.

    Args:
        state: the state to put them into.
        values: by name, as :func:`state_dict` or ``Module.state_dict`` gives them.

    Raises:
        StateError: naming every missing and unexpected name, or the leaf whose shape, dtype or device differs, or two
            tied names with unequal values.
    """
    expected = state_dict(state)
    found = difference(expected, {name: values[name] for name in values}, "state_dict")
    if found is not None:
        raise StateError(f"load_state_dict: {found}")
    if not state.layout.module:
        treedef = flatten(state.params)[1]
        paths = [path for path, _ in leaves_with_paths(state.params, "params")]
        return state.replace(params=unflatten(treedef, [values[path].detach().clone() for path in paths]))
    for name, leaf in state.layout.aliases:
        if name in expected and leaf in expected and not torch.equal(values[name], values[leaf]):
            raise StateError(f"load_state_dict: {name} and {leaf} are one tied leaf but their values differ")
    return state.replace(
        params={name: values[name].detach().clone() for name in state.params},
        buffers={
            name: values[name].detach().clone() if name in values else buffer for name, buffer in state.buffers.items()
        },
    )
