"""Init: the first state of a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..state.errors import StateError
from ..state.key import random_key
from ..state.layout import Layout, named_buffers, named_params
from ..state.record import Counters, TrainState
from ..state.tree import Tree, leaves, map_leaves
from ..state.window import RunningWindow
from .checks import check_params, check_state
from .compose import Step

__all__ = ["init"]


def init(model: nn.Module | Tree, step: Step, *, seed: int = 0, window: int = 20) -> TrainState:
    """The first state: copies of the module's params and buffers, and what each concern of the step needs.

    Args:
        model: a module, or a tree of tensors where ``forward`` was given none.
        step: the composed step.
        seed: of every random number of the run.
        window: how many of the last losses to remember.

    Returns:
        A state of its own storage, on the device of the params.

    Raises:
        StateError: if the params are lazy or overlap, are not tensors, or do not fit the step's module.
        TypeError: if ``step`` is not composed, or ``seed`` is not an int.

    Example:
        >>> import torch, purestep as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss(model, x, key):
        ...     return ps.Loss(model(x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.adam(1e-3)))
        >>> state = ps.init(model, step, seed=0)
        >>> sorted(state.params), int(state.counters.updates)
        (['bias', 'weight'], 0)
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must come from ps.compose, got {type(step).__name__}")
    if isinstance(model, nn.Module):
        layout, params, buffers = Layout.of(model), named_params(model), named_buffers(model)
    else:
        layout, params, buffers = Layout(module=False), model, {}
    _refuse_params(params)
    check_params(step, params, buffers)
    params, buffers = _copied(params), _copied(buffers)
    slots = _slots(step, params)
    device = leaves(params)[0].device
    state = TrainState(
        params=params,
        buffers=buffers,
        opt_state=slots.pop("opt_state", None),
        counters=Counters.zero(device),
        window=RunningWindow.empty(window, device=device),
        key=random_key(seed, device=device),
        slots=slots,
        layout=layout,
    )
    check_state(step, state)
    return state


def _copied(tree: Tree) -> Tree:
    return map_leaves(lambda leaf: leaf.detach().clone(), tree)


def _slots(step: Step, params: Tree) -> dict[str, Tree]:
    """What the concerns declare, over the params that will have gradients; copied, so that no two leaves are one."""
    trainable = step.trainable(params)
    if not leaves(trainable):
        raise StateError("no leaf of the params is trainable: all are frozen or of a dtype without gradients")
    declared: dict[str, Tree] = {}
    for concern in step.concerns:
        declared.update({name: _copied(tree) for name, tree in concern.slots(trainable).items()})
    return declared


def _refuse_params(params: Any) -> None:
    values = leaves(params)
    if not values:
        raise StateError("the model has no params: a tree with at least one tensor is needed")
    for leaf in values:
        if not isinstance(leaf, Tensor):
            raise StateError(f"params must be a tree of tensors, found {leaf!r} of type {type(leaf).__name__}")
        if leaf.is_meta:
            raise StateError("the params lie on the meta device and have no values; materialise the module first")
    if len({leaf.device for leaf in values}) > 1:
        raise StateError(f"the params lie on several devices: {sorted({str(leaf.device) for leaf in values})}")
