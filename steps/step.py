"""The step concern: let an optimizer move the params."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar
from weakref import WeakSet

import attrs
import torch
from torch import Tensor

from ..state.torch_private import is_tracing
from ..state.tree import Tree, own_containers
from .concern import Flow
from .faults import RATE
from .guard import Guard
from .hyper import ANY
from .random_ops import keyed
from .transform import Transformation, apply_updates

__all__ = ["OptimizerStep", "step"]

_proven: WeakSet[OptimizerStep] = WeakSet()

OPT_STATE = "opt_state"  # the one slot that has a field of its own in the state


def step(optimizer: Transformation) -> OptimizerStep:
    r"""Move the params: :math:`\theta \leftarrow \theta + u(g, s, \theta)`.

    Args:
        optimizer: a transformation such as ``ps.adamw(...)``.

    Returns:
        A concern, to be called as ``(grads, opt_state, params) -> (params, opt_state)``.

    Raises:
        TypeError: if ``optimizer`` is not a transformation.

    Example:
        >>> import torch, purestep as ps
        >>> move = ps.step(ps.sgd(0.5))
        >>> params, _ = move(torch.tensor(2.0), move.optimizer.init(torch.tensor(1.0)), torch.tensor(1.0))
        >>> float(params)
        0.0
    """
    if not isinstance(optimizer, Transformation):
        raise TypeError(f"optimizer must be a Transformation such as ps.adamw(...), got {type(optimizer).__name__}")
    return OptimizerStep(optimizer)


@attrs.frozen(eq=False)
class OptimizerStep:
    """An optimizer in a step; see :func:`step`."""

    takes: ClassVar[str] = "grads"
    gives: ClassVar[str] = "state"
    slot_names: ClassVar[tuple[str, ...]] = (OPT_STATE,)

    optimizer: Transformation

    def slots(self, params: Tree) -> Mapping[str, Tree]:
        """The optimizer's state for the trainable params (``None`` where frozen)."""
        return {OPT_STATE: self.optimizer.init(params)}

    def __call__(
        self, grads: Tree, opt_state: Tree, params: Tree, hyper: Mapping[str, Tensor] | None = None
    ) -> tuple[Tree, Tree]:
        """The params and the optimizer's state after the update.

        Raises:
            StateError: if the optimizer's state does not fit the params.
        """
        own = own_containers  # an optimizer may well assign into a dict
        updates, after = self.optimizer.update(own(grads), own(opt_state), own(params), hyper)
        return apply_updates(params, updates), after

    @contextlib.contextmanager
    def _watched(self, flow: Flow) -> Iterator[None]:
        """Guard what the optimizer is given; eagerly only at its first update: the code is the same, and it takes time."""
        if torch.compiler.is_dynamo_compiling() or (self in _proven and not is_tracing()):
            yield
            return
        with keyed(None, Guard(grads=flow.value, state=flow.state, hyper=flow.hyper)):
            yield
        _proven.add(self)

    def apply(self, flow: Flow) -> Flow:
        """The flow with the new state as its value and the rate reported; a rate that is not finite is a fault."""
        state = flow.state
        with self._watched(flow):
            params, opt_state = self(flow.value, state.opt_state, state.params, flow.hyper)
            used = {**self.optimizer.hyperparams(state.opt_state), **flow.hyper}
        fault = flow.fault
        ranges = self.optimizer.ranges or {}
        for name, value in used.items():
            fault = torch.where(ranges.get(name, ANY).holds(value), fault, fault | RATE)
        rate = {"lr": used["lr"]} if "lr" in used else {}
        return flow.replace(
            value=state.replace(params=params, opt_state=opt_state), fault=fault, metrics={**rate, **flow.metrics}
        )
