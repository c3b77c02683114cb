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
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.distributions import bernoulli, normal, uniform
from ..state.errors import RandomOpError
from ..state.torch_private import DispatchMode, schema
from .guard import Guard

__all__ = ["FIRST_STREAM", "draws", "keyed"]

FIRST_STREAM = 1 << 31

aten = torch.ops.aten


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
    with _one_at_a_time, _counting() as generator, _KeyedMode(key, generator, guard):
        yield


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
    def __init__(self, key: Tensor | None, generator: torch.Generator, guard: Guard | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor is its constructor
        self.key, self.generator, self.guard = key, generator, guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.guard is not None and schema(func).is_mutable:
            self.guard.check(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        return self._answer(func, _named_arguments(func, args, kwargs))

    def _answer(self, func: Any, given: dict[str, Any]) -> Any:
        rule = _RULES.get(func.overloadpacket)
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
        values = rule(_Source(self.key, FIRST_STREAM + count), given)
        target = given.get("self")
        mutates = schema(func).is_mutable and isinstance(target, Tensor)
        return target.copy_(values) if mutates else values  # type: ignore[union-attr]


@attrs.frozen
class _Source:
    """One draw: a stream of a key."""

    key: Tensor
    stream: int

    def bernoulli(self, *args: Any, **kwargs: Any) -> Tensor:
        return bernoulli(self.key, *args, **kwargs, stream=self.stream)

    def uniform(self, *args: Any, **kwargs: Any) -> Tensor:
        return uniform(self.key, *args, **kwargs, stream=self.stream)

    def normal(self, *args: Any, **kwargs: Any) -> Tensor:
        return normal(self.key, *args, **kwargs, stream=self.stream)


def _named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = schema(func).arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(arguments, args, strict=False)})
    given.update(kwargs)
    return given


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call draws at all: attention and recurrent kernels carry the tag with dropout switched off too."""
    given = _named_arguments(func, args, kwargs)
    for name in ("dropout_p", "dropout", "dropout_prob"):
        if name in given:
            return bool(given[name])
    if func.overloadpacket in (aten.native_dropout, aten.rrelu_with_noise, aten.rrelu_with_noise_functional):
        return bool(given.get("train", given.get("training")))
    return True


def _dtype(given: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    like, asked = given.get("self"), given.get("dtype")
    if isinstance(asked, torch.dtype):  # a schema's own default is a bare number
        return asked
    return default or (like.dtype if isinstance(like, Tensor) else torch.get_default_dtype())


def _shape(given: dict[str, Any]) -> tuple[int, ...]:
    like = given.get("self")
    return tuple(like.shape) if isinstance(like, Tensor) else tuple(given["size"])


def _bernoulli(source: _Source, given: dict[str, Any]) -> Tensor:
    p, like = given.get("p"), given["self"]
    return source.bernoulli(like if p is None else p, like.shape, dtype=like.dtype)


def _uniform(source: _Source, given: dict[str, Any]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return source.uniform(_shape(given), low, high, dtype=_dtype(given))


def _normal(source: _Source, given: dict[str, Any]) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [value for value in (mean, std, given.get("self")) if isinstance(value, Tensor)]
    if "size" in given or "self" in given:
        return source.normal(_shape(given), mean, std, dtype=_dtype(given))
    shape = (tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]).shape
    return source.normal(shape, mean, std, dtype=tensors[0].dtype)


def _randint(source: _Source, given: dict[str, Any]) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    like = given.get("self")
    shape = _shape(given)
    default = like.dtype if isinstance(like, Tensor) else torch.int64
    word = source.uniform(shape, dtype=torch.float64)
    values: Tensor = low + torch.floor(word * (high - low))
    return values.to(_dtype(given, default))


def _random(source: _Source, given: dict[str, Any]) -> Tensor:
    like = given["self"]
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        # torch's own range: every integer that the dtype holds exactly.
        mantissa = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
        high = 2 ** mantissa[like.dtype] + 1 if like.dtype.is_floating_point else torch.iinfo(like.dtype).max
    return _randint(source, {"low": low, "high": high, "self": like})


def _randperm(source: _Source, given: dict[str, Any]) -> Tensor:
    return torch.argsort(source.uniform((given["n"],), dtype=torch.float64), stable=True).to(_dtype(given, torch.int64))


def _exponential(source: _Source, given: dict[str, Any]) -> Tensor:
    like = given["self"]
    fraction = source.uniform(like.shape, dtype=torch.float64)
    waiting: Tensor = -torch.log1p(-fraction) / given.get("lambd", 1.0)
    return waiting.to(like.dtype)


def _native_dropout(source: _Source, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    like, p = given["input"], given["p"]
    mask = source.bernoulli(1.0 - p, like.shape)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    kept: Tensor = like * mask * scale
    return kept, mask


def _multinomial(source: _Source, given: dict[str, Any]) -> Tensor:
    weights, count = given["self"], given["num_samples"]
    if given.get("replacement"):
        fraction = source.uniform((*weights.shape[:-1], count), dtype=torch.float64)
        edges = torch.cumsum(weights.to(torch.float64), -1)
        return torch.searchsorted(edges, fraction * edges[..., -1:], right=True).clamp(max=weights.shape[-1] - 1)
    # Without replacement: the smallest of exponential waiting times, each with its weight as rate.
    fraction = source.uniform(weights.shape, dtype=torch.float64)
    return torch.topk(-(-torch.log1p(-fraction) / weights.to(torch.float64)), count, dim=-1).indices


_RULES: dict[Any, Callable[[_Source, dict[str, Any]], Any]] = {
    aten.bernoulli: _bernoulli,
    aten.bernoulli_: _bernoulli,
    aten.rand: _uniform,
    aten.rand_like: _uniform,
    aten.uniform_: _uniform,
    aten.uniform: _uniform,
    aten.randn: _normal,
    aten.randn_like: _normal,
    aten.normal_: _normal,
    aten.normal: _normal,
    aten.randint: _randint,
    aten.randint_like: _randint,
    aten.random_: _random,
    aten.randperm: _randperm,
    aten.exponential_: _exponential,
    aten.exponential: _exponential,
    aten.native_dropout: _native_dropout,
    aten.multinomial: _multinomial,
}
