"""Random operations of plain torch code, answered from a key.

``nn.Dropout`` and its kin draw from torch's global generator. Inside :func:`keyed` every random operation is answered
with Philox numbers of the step's key instead, eager and while tracing alike, so no random operation is left in a graph
and the global generator does not move.

The n-th draw of a forward reads stream 2**31 + n of the key (a loss's own draws from it default to stream 0). The
counter n is kept in the seed of torch's own generator for the time of the context: ``torch.utils.checkpoint`` saves and
restores that generator around a recomputed block, so the recomputation draws the same numbers without knowing of keys.
The generator is put back at the end.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..state.constants import is_constant
from ..state.errors import RandomOpError, TraceError
from ..state.torch_private import DispatchMode, gives_number, is_fake, is_operation, is_tracing, schema
from .guard import Guard
from .random_rules import RULES, Means, Source, draws, named_arguments

__all__ = ["FIRST_STREAM", "calm", "keyed"]

FIRST_STREAM = 1 << 31


@contextlib.contextmanager
def keyed(key: Tensor | None, guard: Guard | None = None) -> Iterator[None]:
    """Answer random operations from ``key``; without a key they are refused.

    Args:
        key: int64 tensor of shape (2,), or ``None``.
        guard: of the tensors that no operation may write into.

    Raises:
        PurityError: from an operation that writes into what is guarded.
        RandomOpError: from a random operation that has no keyed form, that names a generator of its own, or that is
            drawn without a key.

    Example:
        >>> from purestep.state.key import random_key
        >>> with keyed(random_key(0)):
        ...     torch.rand(2)
        tensor([0.7455, 0.0569])
    """
    if torch.compiler.is_dynamo_compiling():
        # Dynamo traces neither a dispatch mode nor a generator; there a model draws through keyed modules.
        yield
        return
    with _one_at_a_time, _counting() as generator:
        try:
            with _KeyedMode(key, generator, guard):
                yield
        finally:
            if guard is not None:
                guard.release()


_calm = contextvars.ContextVar("calm", default=False)


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Answer random operations with their means instead: what is asked then does not depend on the draws.

    Example:
        >>> from purestep.state.key import random_key
        >>> with calm(), keyed(random_key(0)):
        ...     torch.rand(2)
        tensor([0.5000, 0.5000])
    """
    token = _calm.set(True)
    try:
        yield
    finally:
        _calm.reset(token)


_one_at_a_time = threading.RLock()  # the generator is the process's: eager forwards of several threads take turns


@contextlib.contextmanager
def _counting() -> Iterator[torch.Generator]:
    """Torch's generator with its seed as a counter from 0, put back at the end."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(0)
    try:
        yield generator
    finally:
        generator.set_state(before)


class _KeyedMode(DispatchMode):  # type: ignore[no-untyped-call] # torch's class is not annotated
    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self, key: Tensor | None, generator: torch.Generator, guard: Guard | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor is its constructor
        self.key, self.generator, self.guard = key, generator, guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_untraceable(func, args)
        if self.guard is not None and schema(func).is_mutable:
            self.guard.check(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        return self._answer(func, named_arguments(func, args, kwargs))

    def _answer(self, func: Any, given: dict[str, Any]) -> Any:
        rule = RULES.get(func.overloadpacket)
        if rule is None:
            raise RandomOpError(
                f"{func} has no keyed form: it would draw from torch's global generator. Draw the numbers with "
                "ps.uniform, ps.normal or ps.bernoulli from the key that the loss is given"
            )
        if given.get("generator") is not None:
            raise RandomOpError(
                f"{func} draws from a torch.Generator of its own, whose state is not part of the training state; "
                "leave the generator out"
            )
        if self.key is None:
            raise RandomOpError(f"{func} draws random numbers but no key was given: pass key=ps.random_key(seed)")
        count = self.generator.initial_seed()
        self.generator.manual_seed(count + 1)
        source = Source(self.key, FIRST_STREAM + count)
        values = rule(Means(source.key, source.stream) if _calm.get() else source, given)
        target = given.get("self")
        mutates = schema(func).is_mutable and isinstance(target, Tensor)
        return target.copy_(values) if mutates else values  # type: ignore[union-attr]


def _refuse_untraceable(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what would run unseen by the mode, or freeze the value of a tensor that the code closes over."""
    if not is_operation(func):
        raise TraceError(
            f"torch.{func} runs functions of its own, whose random operations and writes a step cannot follow; use "
            "torch.where, or a loop over microbatches"
        )
    if gives_number(func) and is_tracing() and not is_fake(args[0]) and not is_constant(args[0]):
        raise TraceError(
            "the step reads the value of a tensor that it closes over, which would be frozen into the compiled step; put "
            "the tensor into the batch, make it a buffer, or wrap it in ps.constant(...) if it never changes"
        )
