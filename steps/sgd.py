"""Stochastic gradient descent."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..state.tree import Tree
from .hyper import ANY, Hyper, Range, check_hyper, evaluate
from .transform import HyperValues, Transformation, merged, moments_like, scalar_like, update_leaves, zero_count

__all__ = ["SgdState", "sgd"]


_RANGES = {"lr": ANY, "weight_decay": Range()}


class SgdState(NamedTuple):
    """What :func:`sgd` keeps.

    Attributes:
        count: 0-d int64, updates so far.
        trace: tree like the params, the momentum; ``None`` without momentum.
    """

    count: Tensor  # type: ignore[assignment] # the field's word; it hides tuple.count
    trace: Tree


def sgd(
    lr: Hyper,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: Hyper = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Transformation:
    r"""Gradient descent with momentum, the rule of ``torch.optim.SGD``.

    :math:`d = g + \lambda\theta`; :math:`b \leftarrow \mu b + (1 - \tau) d`, the first time :math:`b = d`;
    :math:`u = -\gamma\, b`, with Nesterov :math:`u = -\gamma (d + \mu b)`.

    Args:
        lr: :math:`\gamma`: a number, a 0-d tensor or a schedule of the update count.
        momentum: :math:`\mu`, in [0, 1]; 0 keeps no state.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`, added to the gradient.
        nesterov: look ahead by one momentum; needs momentum and no dampening.
        maximize: climb instead.

    Raises:
        TypeError: if ``momentum`` or ``dampening`` is a tensor or a schedule.
        ValueError: if a number is out of range, or ``nesterov`` is given without momentum or with dampening.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.sgd(0.1)
        >>> updates, _ = tx.update({"w": torch.tensor(2.0)}, tx.init({"w": torch.tensor(0.0)}), {"w": torch.tensor(0.0)})
        >>> updates
        {'w': tensor(-0.2000)}

    Reference:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.
    """
    own = {"lr": check_hyper("lr", lr, _RANGES["lr"])}
    own["weight_decay"] = check_hyper("weight_decay", weight_decay, _RANGES["weight_decay"])
    for name, value, within in (("momentum", momentum, Range(0.0, 1.0)), ("dampening", dampening, Range(-inf, 1.0))):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number: it decides what state is kept; got {value!r}")
        check_hyper(name, value, within)
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(f"nesterov needs momentum > 0 and dampening = 0, got {momentum} and {dampening}")
    decays = not (isinstance(weight_decay, (int, float)) and weight_decay == 0.0)

    def init(params: Tree) -> SgdState:
        return SgdState(zero_count(params), moments_like(params) if momentum else None)

    def hyperparams(opt_state: SgdState) -> dict[str, Tensor]:
        return {name: evaluate(value, opt_state.count) for name, value in own.items()}

    def update(
        grads: Tree, opt_state: SgdState, params: Tree, hyper: HyperValues | None = None
    ) -> tuple[Tree, SgdState]:
        now = {name: evaluate(value, opt_state.count) for name, value in merged(own, hyper).items()}
        sign = -1.0 if maximize else 1.0
        decay = decays or "weight_decay" in (hyper or {})

        def direction(grad: Tensor, param: Tensor) -> Tensor:
            return param * scalar_like(now["weight_decay"], param) + sign * grad if decay else sign * grad

        def plain(grad: Tensor, param: Tensor) -> tuple[Tensor]:
            return (direction(grad, param) * -scalar_like(now["lr"], param),)

        def heavy(grad: Tensor, param: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:
            d = direction(grad, param)
            d = d if d.layout == torch.strided else d.to_dense()  # the momentum is dense in any case
            moved = trace * momentum + d * (1.0 - dampening)
            trace = torch.where(opt_state.count == 0, d, moved) if dampening else moved
            ahead = d + trace * momentum if nesterov else trace
            return ahead * -scalar_like(now["lr"], param), trace

        if not momentum:
            (updates,) = update_leaves(plain, grads, params, sparse=True)
            return updates, SgdState(opt_state.count + 1, None)
        updates, trace = update_leaves(heavy, grads, params, opt_state.trace, sparse=True)
        return updates, SgdState(opt_state.count + 1, trace)

    return Transformation(init, update, hyperparams, _RANGES)
