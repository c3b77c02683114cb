"""What is refused before a step runs, each with the leaf's path and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..state.errors import BatchError, StateError
from ..state.record import TrainState
from ..state.spec import difference
from ..state.tree import flatten, leaves, leaves_with_paths, map_leaves
from ..steps.step import OptimizerStep

if TYPE_CHECKING:
    from .compose import Step

__all__ = ["check_batch", "check_params", "check_result", "check_state", "refuse_inference_mode"]

_INIT = "make the state with ps.init(model, step)"


def check_state(step: Step, state: TrainState) -> None:
    """Refuse what is not a state of this step.

    Raises:
        StateError: naming the slot that is missing, the leaf that is not a tensor, or the params that are not the
            template's.
        DonatedError: if the state was donated.
    """
    if not isinstance(state, TrainState):
        raise StateError(f"state must be a TrainState, got {type(state).__name__}; {_INIT}")
    for concern in step.concerns:
        for slot in concern.slot_names:
            missing = state.opt_state is None if slot == "opt_state" else slot not in state.slots
            if missing:
                raise StateError(f"the state has no slot {slot!r}, which {type(concern).__name__} needs; {_INIT}")
    for path, leaf in leaves_with_paths(state, "state"):
        if not isinstance(leaf, Tensor):
            raise StateError(f"{path} is {leaf!r}, a Python value, where a tensor is needed; {_INIT}")
        if leaf.is_inference():
            raise StateError(
                f"{path} was made inside torch.inference_mode(), so no gradient can be taken of it; make the state outside, "
                "or ps.copy_state(state) there"
            )
        if leaf.requires_grad:
            raise StateError(f"{path} requires a gradient; a state holds plain tensors: detach it")
    for name, clock in (("updates", state.counters.updates), ("skips", state.counters.skips)):
        if clock.dtype != torch.int64 or clock.dim():
            raise StateError(
                f"state.counters.{name} must be 0-d int64, got {clock.dtype} of shape {tuple(clock.shape)}"
            )
    check_params(step, state.params, state.buffers)
    _check_opt_state(step, state)


def _check_opt_state(step: Step, state: TrainState) -> None:
    """Refuse the state of another optimizer, or of this one with other options."""
    for concern in step.concerns:
        if isinstance(concern, OptimizerStep):
            misfit = difference(_expected(step, concern, state.params), _forms(state.opt_state), "state.opt_state")
            if misfit is not None:
                raise StateError(f"the state was made for another optimizer: {misfit}; {_INIT}")


_expected_of: WeakKeyDictionary[OptimizerStep, dict[Any, Any]] = WeakKeyDictionary()


def _expected(step: Step, concern: OptimizerStep, params: Any) -> Any:
    """The form of the optimizer's state for these params, found once for each form of params."""
    known = _expected_of.setdefault(concern, {})
    values, treedef = flatten(params)
    key = (treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in values))
    if key not in known:
        meta = map_leaves(lambda leaf: torch.empty_like(leaf, device="meta"), step.trainable(params))
        known[key] = _forms(concern.slots(meta)["opt_state"])
    return known[key]


def _forms(tree: Any) -> Any:
    return map_leaves(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), tree)


def refuse_inference_mode() -> None:
    """Refuse to differentiate where torch cannot.

    Raises:
        StateError: inside ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise StateError("a step was called inside torch.inference_mode(), where torch records no gradient; leave it")


def check_params(step: Step, params: Any, buffers: Any) -> None:
    """Refuse params and buffers that are not those of the step's module.

    Raises:
        StateError: naming what is missing, unexpected or of another shape.
    """
    for phase in step.phases:
        if phase.forward.template is not None:
            _check_template(phase.forward.template.params, params, "state.params")
            _check_template(phase.forward.template.buffers, buffers, "state.buffers")


def _check_template(expected: Any, found: Any, root: str) -> None:
    if not isinstance(found, dict):
        raise StateError(f"{root} must be a dict by parameter name, got {type(found).__name__}; {_INIT}")
    misfit = difference(_shapes(expected), _shapes(found), root)
    if misfit is not None:
        raise StateError(f"the state does not fit the module of this step: {misfit}; {_INIT}")


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shapes only: params may be of another dtype or device than the module was when it became a template."""
    return {name: torch.empty(tensor.shape, device="meta", dtype=torch.bool) for name, tensor in tensors.items()}


def check_batch(state: TrainState, batch: Any) -> None:
    """Refuse a batch that a step would misread.

    Raises:
        BatchError: naming the leaf that requires a gradient, was made in inference mode or lies on another device than the
            params.
    """
    home = next((leaf.device for leaf in leaves(state.params)), state.key.device)
    for path, leaf in leaves_with_paths(batch, "batch"):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.requires_grad:
            raise BatchError(f"{path} requires a gradient, which a step does not give; detach it")
        if leaf.is_inference():
            raise BatchError(
                f"{path} was made inside torch.inference_mode() and cannot enter a gradient; clone it outside"
            )
        if leaf.device != home:
            raise BatchError(f"{path} lies on {leaf.device}, the params on {home}; move it with .to({str(home)!r})")


def check_result(before: TrainState, after: TrainState) -> None:
    """Refuse a step that changed what must not change: structure, shapes, dtypes, devices.

    Raises:
        StateError: naming the leaf and both specs.
    """
    found = difference(before, after, "state")
    if found is not None:
        raise StateError(f"the step changed the form of the state, which must stay over a step: {found}")
