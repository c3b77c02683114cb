"""Functions of the user's own in a step: what they must return where they stand, and how they follow a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from ..state.errors import ComposeError
from ..state.record import TrainState
from ..state.sums import Loss
from ..state.tree import Tree, leaves
from ..steps.concern import Applied, Custom, Flow
from ..steps.forward import Forward

__all__ = ["RESERVED", "Then", "checked", "expect"]

RESERVED = ("loss", "grad_norm", "lr", "weight", "updated", "fault")
"""Metrics that a step reports itself."""


def checked(concern: Applied, before: Flow, after: Flow) -> Flow:
    """Refuse what a user's function must not give: another kind, a Python number in place of a tensor.

    Raises:
        ComposeError: naming the function and what it gave.
    """
    if not isinstance(concern, Custom):
        return after
    kind = TrainState if isinstance(before.value, TrainState) else None
    if kind is not None:
        expect(after.value, kind, concern)
    else:
        for leaf in leaves(after.value):
            if not isinstance(leaf, Tensor):
                raise ComposeError(f"{concern.name} returned {leaf!r} among the gradients where a tensor is needed")
    for name, value in after.metrics.items():
        if name in RESERVED and value is not before.metrics.get(name):
            raise ComposeError(
                f"{concern.name}: the metric {name!r} is reported by the step itself; choose another name"
            )
        if not isinstance(value, Tensor) or value.dim():
            raise ComposeError(f"{concern.name}: metrics[{name!r}] must be a 0-d tensor, got {value!r}")
    return after


def expect(value: Any, kind: type, concern: Custom) -> Any:
    """The value, if it is of the kind that flows where the function stands.

    Raises:
        ComposeError: naming the function and what it gave.
    """
    if not isinstance(value, kind):
        raise ComposeError(f"{concern.name} stands where a {kind.__name__} flows and must return one, got {value!r}")
    return value


@attrs.frozen(eq=False)
class Then:
    """A forward followed by functions on its loss; itself what a forward is to ``backward``."""

    forward: Forward
    functions: tuple[Custom, ...]

    def is_trainable(self, path: tuple[Any, ...], leaf: Tensor) -> bool:
        """Whether a leaf is differentiated: what the forward says."""
        return self.forward.is_trainable(path, leaf)

    def __call__(self, params: Tree, microbatch: Any, key: Tensor | None = None) -> Loss:
        """The loss of one microbatch after the functions."""
        with self.bound(params, key, None) as call:
            return call(microbatch)

    @contextlib.contextmanager
    def bound(
        self, params: Tree, key: Tensor | None, buffers: Mapping[str, Tensor] | None
    ) -> Iterator[Callable[..., Loss]]:
        """``call(microbatch, carry) -> Loss`` while the forward's module is bound to ``params``."""
        with self.forward.bound(params, key, buffers) as call:

            def then(microbatch: Any, carry: Tree = None) -> Loss:
                loss = call(microbatch, carry)
                for fn in self.functions:
                    after = expect(fn.call(loss, key), Loss, fn)
                    # A function may well make a new Loss, and knows nothing of the buffers that travel in it.
                    loss = after if after.buffers is not None else after.replace(buffers=loss.buffers)
                return loss

            yield then
