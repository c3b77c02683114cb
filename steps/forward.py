"""The forward concern: a loss function and a module as one pure function of the params."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
from torch import Tensor, nn

from ..state.errors import LossError
from ..state.sums import Loss
from ..state.tree import Tree, own_containers
from .concern import Stateless
from .guard import Guard
from .keyed_modules import bind_key
from .random_ops import keyed
from .scope import scope
from .template import Template

__all__ = ["Forward", "forward"]

LossFn = Callable[..., Loss]
Call = Callable[[Any, Tree], Loss]


def forward(loss: LossFn, model: nn.Module | None = None) -> Forward:
    r"""The loss of a microbatch as a pure function: :math:`(\theta, x, k) \mapsto (\ell, w)`.

    The module is a template: it is copied here with its train and eval flags and without its values; later changes of
    the original have no effect. Its random operations (dropout) are drawn from the key.

    Args:
        loss: ``loss(model, microbatch, key) -> Loss``, or with a fourth parameter the carry of the chunk before.
            ``model`` is the module bound to the params, or the tree of params itself where no module is given.
        model: a module, with all its parameters materialised.

    Returns:
        A concern, to be called as ``(params, microbatch, key) -> Loss``.

    Raises:
        TypeError: if ``loss`` does not take three or four arguments, or ``model`` is not a module.
        StateError: if the module is lazy or cannot be a template.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> fn = ps.forward(loss)
        >>> float(fn(torch.tensor(2.0), torch.tensor([1.0, 3.0])).mean())
        4.0
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function, got {loss!r}")
    return Forward(loss, None if model is None else Template(model), _arity(loss) == 4)


def _arity(loss: LossFn) -> int:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except ValueError:  # a builtin without a signature
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and len(required) <= 3:
        return 3
    if len(required) > 4 or len(positional) < 3:
        raise TypeError(
            "loss must take (model, batch, key), or (model, batch, key, carry); "
            f"got {getattr(loss, '__name__', loss)}{inspect.signature(loss)}"
        )
    return 4 if len(required) == 4 else 3


@attrs.frozen(eq=False)
class Forward(Stateless):
    """A loss function with its template; see :func:`forward`."""

    takes: ClassVar[str] = "microbatch"
    gives: ClassVar[str] = "loss"

    loss: LossFn
    template: Template | None
    takes_carry: bool

    def apart(self) -> Forward:
        """The same with a template of its own: what tracing leaves in a module stays out of the eager step."""
        return self if self.template is None else attrs.evolve(self, template=self.template.copy())

    def is_trainable(self, path: tuple[Any, ...], leaf: Tensor) -> bool:
        """Whether a leaf is differentiated: not frozen in the template, and of a dtype that has a gradient."""
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return False
        return self.template is None or path[0] in self.template.trainable

    def __call__(
        self,
        params: Tree,
        microbatch: Any,
        key: Tensor | None = None,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        carry: Tree = None,
    ) -> Loss:
        """The loss of one microbatch, with the buffers after it.

        Raises:
            LossError: if the loss function returns anything but a :class:`Loss`.
            StateError: if params or buffers do not fit the template.
            RandomOpError: if a random operation is drawn without a key.
        """
        with self.bound(params, key, buffers) as call:
            return call(microbatch, carry)

    @contextlib.contextmanager
    def bound(
        self, params: Tree, key: Tensor | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> Iterator[Call]:
        """``call(microbatch, carry) -> Loss`` while the module is bound to ``params``.

        Hold it over the backward as well: a checkpointed block runs its forward again there.
        """
        guard = Guard(params=params, key=key)
        with keyed(key, guard):  # first: it also keeps other threads out, which the template needs too
            if self.template is None:
                yield functools.partial(self._call, guard, own_containers(params), key)
                return
            guard.add(model=self.template.constants)
            own = {name: buffer.clone() for name, buffer in (buffers or {}).items()}
            guard.watch(buffers=own)
            with self.template.bound(params, own) as module, bind_key(module, key):
                call = functools.partial(self._call, guard, module, key)
                yield functools.partial(self._with_buffers, call, self.template, own)

    def _with_buffers(
        self, call: Call, template: Template, own: dict[str, Tensor], microbatch: Any, carry: Tree = None
    ) -> Loss:
        loss = call(microbatch, carry)
        return loss.replace(buffers={name: buffer.detach() for name, buffer in template.written_buffers(own).items()})

    def _call(self, guard: Guard, model: Any, key: Tensor | None, microbatch: Any, carry: Tree = None) -> Loss:
        guard.add(batch=microbatch, carry=carry)
        with scope("forward"):
            loss = self.loss(model, microbatch, key, carry) if self.takes_carry else self.loss(model, microbatch, key)
        name = getattr(self.loss, "__name__", "loss")
        if isinstance(loss, Tensor):
            raise LossError(
                f"{name} returned a bare tensor of shape {tuple(loss.shape)}: its weight is not known. Return "
                "ps.Loss(total, weight=...) with the sum over the rows or tokens and how many they are"
            )
        if not isinstance(loss, Loss):
            raise LossError(f"{name} must return a ps.Loss, got {type(loss).__name__}")
        return loss
