"""Adam and AdamW."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state.tree import Tree
from .hyper import ANY, Hyper, Range, check_hyper, evaluate
from .transform import (
    HyperValues,
    LeafRule,
    Transformation,
    merged,
    moments_like,
    scalar_like,
    update_leaves,
    zero_count,
)

__all__ = ["AdamState", "adam", "adamw"]


_RANGES = {
    "lr": ANY,
    "b1": Range(0.0, 1.0, below=True),
    "b2": Range(0.0, 1.0, below=True),
    "eps": Range(),
    "weight_decay": Range(),
}


class AdamState(NamedTuple):
    """What :func:`adam` and :func:`adamw` keep.

    Attributes:
        count: 0-d int64, updates so far.
        mu: tree like the params, mean of the gradients.
        nu: tree like the params, mean of their squares.
        nu_max: with ``amsgrad``, the largest ``nu`` so far; else ``None``.
    """

    count: Tensor  # type: ignore[assignment] # the field's word; it hides tuple.count
    mu: Tree
    nu: Tree
    nu_max: Tree


def adam(
    lr: Hyper = 1e-3,
    *,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Transformation:
    r"""Adam, the rule of ``torch.optim.Adam``: weight decay is added to the gradient.

    :math:`\mu \leftarrow \mu + (1-\beta_1)(g-\mu)`, :math:`\nu \leftarrow \beta_2\nu + (1-\beta_2) g^2`,
    :math:`u = -\gamma\, \frac{\mu / (1-\beta_1^t)}{\sqrt{\nu / (1-\beta_2^t)} + \epsilon}`.

    Args:
        lr: :math:`\gamma`: a number, a 0-d tensor or a schedule of the update count.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        eps: :math:`\epsilon`, > 0 or 0.
        weight_decay: :math:`\lambda`; :math:`g \leftarrow g + \lambda\theta`.
        amsgrad: divide by the largest :math:`\nu` so far.
        maximize: climb instead.

    Raises:
        ValueError: if a number is out of range or not finite.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.adam(0.1)
        >>> updates, state = tx.update(torch.tensor(5.0), tx.init(torch.tensor(0.0)), torch.tensor(0.0))
        >>> updates, int(state.count)
        (tensor(-0.1000), 1)

    Reference:
        Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015. Reddi et al., On the Convergence of Adam, 2018.
    """
    return _adam(lr, b1, b2, eps, weight_decay, amsgrad, maximize, decoupled=False)


def adamw(
    lr: Hyper = 1e-3,
    *,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: float = 1e-8,
    weight_decay: Hyper = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Transformation:
    r"""AdamW, the rule of ``torch.optim.AdamW``: :math:`u = u_{Adam} - \gamma\lambda\theta`, decay apart from the moments.

    Args:
        lr: :math:`\gamma`: a number, a 0-d tensor or a schedule of the update count.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        eps: :math:`\epsilon`, > 0 or 0.
        weight_decay: :math:`\lambda`.
        amsgrad: divide by the largest :math:`\nu` so far.
        maximize: climb instead.

    Raises:
        ValueError: if a number is out of range or not finite.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.adamw(0.1, weight_decay=0.5)
        >>> updates, _ = tx.update(torch.tensor(0.0), tx.init(torch.tensor(2.0)), torch.tensor(2.0))
        >>> updates
        tensor(-0.1000)

    Reference:
        Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019.
    """
    return _adam(lr, b1, b2, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    lr: Hyper,
    b1: Hyper,
    b2: Hyper,
    eps: float,
    weight_decay: Hyper,
    amsgrad: bool,
    maximize: bool,
    *,
    decoupled: bool,
) -> Transformation:
    given = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    own = {name: check_hyper(name, value, _RANGES[name]) for name, value in given.items()}

    def init(params: Tree) -> AdamState:
        mu, nu = moments_like(params), moments_like(params)
        return AdamState(zero_count(params), mu, nu, moments_like(params) if amsgrad else None)

    def hyperparams(opt_state: AdamState) -> dict[str, Tensor]:
        return {name: evaluate(value, opt_state.count) for name, value in own.items()}

    def update(
        grads: Tree, opt_state: AdamState, params: Tree, hyper: HyperValues | None = None
    ) -> tuple[Tree, AdamState]:
        now = {name: evaluate(value, opt_state.count) for name, value in merged(own, hyper).items()}
        count = opt_state.count + 1
        rule = _rule(now, count.to(torch.float64), maximize, decoupled)
        if amsgrad:
            updates, mu, nu, nu_max = update_leaves(rule, grads, params, opt_state.mu, opt_state.nu, opt_state.nu_max)
            return updates, AdamState(count, mu, nu, nu_max)
        updates, mu, nu = update_leaves(rule, grads, params, opt_state.mu, opt_state.nu)
        return updates, AdamState(count, mu, nu, None)

    return Transformation(init, update, hyperparams, _RANGES)


def _rule(now: dict[str, Tensor], t: Tensor, maximize: bool, decoupled: bool) -> LeafRule:
    # Numbers of the whole update, in float64, once; a leaf only sees them rounded to its own dtype.
    correction1, correction2 = 1.0 - now["b1"] ** t, 1.0 - now["b2"] ** t
    step_size, root2 = now["lr"] / correction1, correction2.sqrt()
    shrink, rest1, rest2 = now["lr"] * now["weight_decay"], 1.0 - now["b1"], 1.0 - now["b2"]

    def rule(grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, *nu_max: Tensor) -> tuple[Tensor, ...]:
        def own(value: Tensor) -> Tensor:
            return scalar_like(value, param)

        grad = -grad if maximize else grad
        if not decoupled:
            grad = grad + param * own(now["weight_decay"])
        mu = torch.lerp(mu, grad, own(rest1))  # exact at both ends, where mu + (grad - mu) * 1 is not
        nu = nu * own(now["b2"]) + grad * grad * own(rest2)
        largest = tuple(torch.maximum(seen, nu) for seen in nu_max)
        denominator = (largest[0] if largest else nu).sqrt() / own(root2) + own(now["eps"])
        update = -own(step_size) * (mu / denominator)
        if decoupled:
            update = update - param * own(shrink)
        return (update, mu, nu, *largest)

    return rule
