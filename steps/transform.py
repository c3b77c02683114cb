"""Gradient transformations: pairs of pure functions, in the manner of optax.

``init(params) -> opt_state`` and ``update(grads, opt_state, params) -> (updates, opt_state)``; updates are already
negative, :func:`apply_updates` adds them. A leaf whose gradient is absent (``None``) is left alone with its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from ..state.errors import StateError
from ..state.spec import difference
from ..state.sums import reals, widen
from ..state.tree import Tree, fill, flatten, leaves, map_leaves, map_leaves_to
from .hyper import Range

__all__ = ["ChainState", "Transformation", "apply_updates", "chain", "moments_like", "update_leaves", "zero_count"]

HyperValues = Mapping[str, Tensor]


class Update(Protocol):
    """A pure update of gradients."""

    def __call__(
        self, grads: Tree, opt_state: Tree, params: Tree, hyper: HyperValues | None = None
    ) -> tuple[Tree, Tree]:
        """Updates (to be added to the params) and the next state.

        Args:
            grads: tree like the params, ``None`` where a gradient is absent.
            opt_state: what ``init`` made, or the update before gave.
            params: the params.
            hyper: values that replace hyperparameters for this update, by name.
        """
        ...


@attrs.frozen
class Transformation:
    """A pair of pure functions and, for the metrics, the values of its hyperparameters.

    Attributes:
        init: ``params -> opt_state``.
        update: ``(grads, opt_state, params, hyper) -> (updates, opt_state)``.
        hyperparams: ``opt_state -> {name: 0-d tensor}``, the values that the next update will use.
        ranges: the hyperparameters that ``update`` takes in ``hyper``, by name; ``None`` where that is not known.
    """

    init: Callable[[Tree], Tree]
    update: Update
    hyperparams: Callable[[Tree], dict[str, Tensor]] = attrs.field(default=lambda opt_state: {})
    ranges: Mapping[str, Range] | None = None


class ChainState(NamedTuple):
    """The states of chained transformations, in order."""

    states: tuple[Tree, ...]


def chain(*transformations: Transformation) -> Transformation:
    """One transformation that applies several in order: the updates of one are the gradients of the next.

    Raises:
        ValueError: if none is given.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.chain(ps.sgd(1.0), ps.sgd(-0.5))
        >>> updates, _ = tx.update(torch.tensor(2.0), tx.init(torch.tensor(0.0)), torch.tensor(0.0))
        >>> float(updates)
        -1.0
    """
    if not transformations:
        raise ValueError("chain: give at least one transformation")

    def init(params: Tree) -> ChainState:
        return ChainState(tuple(part.init(params) for part in transformations))

    def update(
        grads: Tree, opt_state: ChainState, params: Tree, hyper: HyperValues | None = None
    ) -> tuple[Tree, ChainState]:
        states = []
        for part, state in zip(transformations, opt_state.states, strict=True):
            known = hyper if part.ranges is None else {n: v for n, v in (hyper or {}).items() if n in part.ranges}
            grads, after = part.update(grads, state, params, known or None)
            states.append(after)
        return grads, ChainState(tuple(states))

    def hyperparams(opt_state: ChainState) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part, state in zip(transformations, opt_state.states, strict=True):
            found.update(part.hyperparams(state))
        return found

    every = [part.ranges for part in transformations]
    known = None if None in every else {name: within for ranges in every for name, within in (ranges or {}).items()}
    return Transformation(init, update, hyperparams, known)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, rounded once to each leaf's dtype; a leaf without an update is kept.

    Example:
        >>> params = {"w": torch.tensor(1.0), "frozen": torch.tensor(2.0)}
        >>> apply_updates(params, {"w": torch.tensor(-0.5), "frozen": None})
        {'w': tensor(0.5000), 'frozen': tensor(2.)}
    """
    return fill(map_leaves(lambda p, u: (widen(p) + u).to(p.dtype), params, updates), params)


def moments_like(params: Tree) -> Tree:
    """Zeros like every leaf that can have a gradient; absent for the others."""
    return map_leaves(lambda p: torch.zeros_like(p) if p.is_floating_point() or p.is_complex() else None, params)


def zero_count(params: Tree) -> Tensor:
    """The count of an optimizer that has made no update: 0-d int64, beside the params."""
    first = leaves(params)
    return torch.zeros((), dtype=torch.int64, device=first[0].device if first else "cpu")


LeafRule = Callable[..., tuple[Tensor, ...]]


def update_leaves(rule: LeafRule, grads: Tree, params: Tree, *moments: Tree, sparse: bool = False) -> tuple[Tree, ...]:
    """Run an optimizer's rule over the leaves that have a gradient; the others keep their moments.

    Half-precision leaves are computed in float32 and their moments rounded once; complex ones as pairs of reals.

    Args:
        rule: ``(grad, param, *moments) -> (update, *moments)`` on real tensors of one shape.
        grads: the gradients.
        params: the params.
        *moments: trees like the params.
        sparse: whether the rule takes sparse gradients.

    Returns:
        The updates, then each of the moments.

    Raises:
        StateError: if a leaf with a gradient has no moment in the state, or a sparse one that the rule does not take.
    """

    def on_leaf(grad: Tensor, param: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        if grad.layout != torch.strided and not sparse:
            raise StateError("this optimizer has no rule for sparse gradients; use sgd, or a dense embedding")
        real = [reals(x) for x in (grad, param, *held)]
        update, *after = rule(*(widen(x) for x in real))
        after = [new.to(old.dtype) for new, old in zip(after, real[2:], strict=True)]
        return tuple(_back(x, param) for x in (update, *after))

    for like, what in ((params, "param"), *((moment, "moment") for moment in moments)):
        _refuse_misfit(grads, like, what)
    out = map_leaves_to(1 + len(moments), on_leaf, grads, params, *moments)
    return (out[0], *(fill(new, old) for new, old in zip(out[1:], moments, strict=True)))


def _refuse_misfit(grads: Tree, like: Tree, what: str) -> None:
    """Each gradient needs a param and its moments, of its own shape: nothing is broadcast or left out in silence."""
    values, treedef = flatten(grads, none_is_leaf=True)
    others, other_def = flatten(like, none_is_leaf=True)
    problem = None
    if treedef != other_def:
        problem = f"their structures differ: {difference(like, grads, 'params') or f'{other_def} and {treedef}'}"
    for index, (grad, other) in enumerate(zip(values, others, strict=False)):
        if problem is None and grad is not None and (other is None or other.shape != grad.shape):
            path, found = treedef.accessors()[index].codify("params"), None if other is None else tuple(other.shape)
            problem = f"{path} has a gradient of shape {tuple(grad.shape)} but a {what} of {found}"
    if problem is not None:
        raise StateError(f"gradients and {what}s do not fit, make the state with ps.init(model, step): {problem}")


def _back(value: Tensor, param: Tensor) -> Tensor:
    return torch.view_as_complex(value) if param.is_complex() else value


def scalar_like(value: Tensor, leaf: Tensor) -> Tensor:
    """A 0-d float64 number in a leaf's dtype and on its device, so that arithmetic with the leaf keeps its dtype."""
    return value.to(device=leaf.device, dtype=leaf.dtype)


def merged(own: Mapping[str, Any], hyper: HyperValues | None) -> dict[str, Any]:
    """An optimizer's own hyperparameters with this update's replacements.

    Raises:
        ValueError: naming a replacement that the optimizer does not know.
    """
    unknown = [name for name in hyper or {} if name not in own]
    if unknown:
        raise ValueError(f"schedule: the optimizer has no hyperparameter {', '.join(unknown)}; it has {', '.join(own)}")
    return {**own, **(hyper or {})}
