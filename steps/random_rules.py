"""Torch's random operations, one rule each: the same numbers' distribution, drawn from one stream of a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.distributions import bernoulli, normal, uniform
from ..state.torch_private import schema

__all__ = ["RULES", "Means", "Source", "draws", "named_arguments"]

aten = torch.ops.aten


@attrs.frozen
class Source:
    """One draw: a stream of a key."""

    key: Tensor
    stream: int

    def bernoulli(self, *args: Any, **kwargs: Any) -> Tensor:
        """Ones and zeros of this stream."""
        return bernoulli(self.key, *args, **kwargs, stream=self.stream)

    def uniform(self, *args: Any, **kwargs: Any) -> Tensor:
        """Uniform numbers of this stream."""
        return uniform(self.key, *args, **kwargs, stream=self.stream)

    def normal(self, *args: Any, **kwargs: Any) -> Tensor:
        """Normal numbers of this stream."""
        return normal(self.key, *args, **kwargs, stream=self.stream)


@attrs.frozen
class Means(Source):
    """A draw of the means: every unit is kept, every number is the middle of its range."""

    def bernoulli(self, p: Any, shape: Any = None, *, dtype: torch.dtype = torch.bool) -> Tensor:
        """Ones."""
        return torch.ones(p.shape if shape is None else tuple(shape), dtype=dtype, device=self.key.device)

    def uniform(self, shape: Any, low: Any = 0.0, high: Any = 1.0, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The middle."""
        middle = (low + high) / 2.0
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.key.device).add(middle).to(dtype)

    def normal(self, shape: Any, mean: Any = 0.0, std: Any = 1.0, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mean."""
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.key.device).add(mean).to(dtype)


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an aten operation by name, with the schema's defaults."""
    arguments = schema(func).arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(arguments, args, strict=False)})
    given.update(kwargs)
    return given


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call draws at all: attention and recurrent kernels carry the tag with dropout switched off too."""
    given = named_arguments(func, args, kwargs)
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


def _bernoulli(source: Source, given: dict[str, Any]) -> Tensor:
    p, like = given.get("p"), given["self"]
    return source.bernoulli(like if p is None else p, like.shape, dtype=like.dtype)


def _uniform(source: Source, given: dict[str, Any]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return source.uniform(_shape(given), low, high, dtype=_dtype(given))


def _normal(source: Source, given: dict[str, Any]) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [value for value in (mean, std, given.get("self")) if isinstance(value, Tensor)]
    if "size" in given or "self" in given:
        return source.normal(_shape(given), mean, std, dtype=_dtype(given))
    shape = (tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]).shape
    return source.normal(shape, mean, std, dtype=tensors[0].dtype)


def _randint(source: Source, given: dict[str, Any]) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    like = given.get("self")
    shape = _shape(given)
    default = like.dtype if isinstance(like, Tensor) else torch.int64
    word = source.uniform(shape, dtype=torch.float64)
    values: Tensor = low + torch.floor(word * (high - low))
    return values.to(_dtype(given, default))


def _random(source: Source, given: dict[str, Any]) -> Tensor:
    like = given["self"]
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        # torch's own range: every integer that the dtype holds exactly.
        mantissa = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
        high = 2 ** mantissa[like.dtype] + 1 if like.dtype.is_floating_point else torch.iinfo(like.dtype).max
    return _randint(source, {"low": low, "high": high, "self": like})


def _randperm(source: Source, given: dict[str, Any]) -> Tensor:
    return torch.argsort(source.uniform((given["n"],), dtype=torch.float64), stable=True).to(_dtype(given, torch.int64))


def _exponential(source: Source, given: dict[str, Any]) -> Tensor:
    like = given["self"]
    fraction = source.uniform(like.shape, dtype=torch.float64)
    waiting: Tensor = -torch.log1p(-fraction) / given.get("lambd", 1.0)
    return waiting.to(like.dtype)


def _native_dropout(source: Source, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    like, p = given["input"], given["p"]
    mask = source.bernoulli(1.0 - p, like.shape)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    kept: Tensor = like * mask * scale
    return kept, mask


def _multinomial(source: Source, given: dict[str, Any]) -> Tensor:
    weights, count = given["self"], given["num_samples"]
    if given.get("replacement"):
        fraction = source.uniform((*weights.shape[:-1], count), dtype=torch.float64)
        edges = torch.cumsum(weights.to(torch.float64), -1)
        return torch.searchsorted(edges, fraction * edges[..., -1:], right=True).clamp(max=weights.shape[-1] - 1)
    # Without replacement: the smallest of exponential waiting times, each with its weight as rate.
    fraction = source.uniform(weights.shape, dtype=torch.float64)
    return torch.topk(-(-torch.log1p(-fraction) / weights.to(torch.float64)), count, dim=-1).indices


RULES: dict[Any, Callable[[Source, dict[str, Any]], Any]] = {
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
