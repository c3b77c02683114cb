r"""Distributions: uniform, normal and 0-1 numbers as pure functions of a key.

Each number is computed from its own random words, in dtypes wide enough that the bits do not depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .key import bits, draw
from .philox import Words

__all__ = ["bernoulli", "normal", "uniform"]

_MANTISSA = {torch.bfloat16: 8, torch.float16: 11}


def _fractions(words: Words) -> tuple[Tensor, Tensor]:
    """Two float64 numbers of 53 bits, uniform in [0, 1), from each block."""
    first, second = (words[0] << 21) | (words[1] >> 11), (words[2] << 21) | (words[3] >> 11)
    return first.to(torch.float64) * 2.0**-53, second.to(torch.float64) * 2.0**-53


def _normals(words: Words) -> tuple[Tensor, Tensor]:
    u, v = _fractions(words)
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-u)), (2.0 * math.pi) * v
    return radius * torch.cos(angle), radius * torch.sin(angle)


def uniform(
    key: Tensor,
    shape: Sequence[int],
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    r"""Numbers uniform in [low, high): :math:`low + (high - low) u`.

    The fraction has as many bits as the dtype's mantissa, so that ``high`` is never reached before scaling.

    Args:
        key: int64 tensor of shape (2,).
        shape: of the result.
        low: lower bound, included.
        high: upper bound, excluded up to rounding.
        dtype: of the result, floating; for a complex one real and imaginary part are drawn.
        stream: which stream of the key, as in :func:`~purestep.state.key.bits`.

    Example:
        >>> from purestep.state.key import random_key
        >>> uniform(random_key(0), (2,))
        tensor([0.3990, 0.8805])
    """
    if dtype.is_complex:
        parts = uniform(key, (*shape, 2), low, high, dtype=dtype.to_real(), stream=stream)
        return torch.view_as_complex(parts)
    count = math.prod(shape)
    if dtype == torch.float64:
        value = draw(key, count, stream, 2, _fractions)
    else:
        width = _MANTISSA.get(dtype, 24)
        value = (bits(key, count, stream=stream) >> (32 - width)).to(torch.float32) * 2.0**-width
    value = value.reshape(tuple(shape))
    if isinstance(low, Tensor) or isinstance(high, Tensor) or (low, high) != (0.0, 1.0):
        value = low + (high - low) * value
    return value.to(dtype)


def normal(
    key: Tensor,
    shape: Sequence[int],
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    r"""Normal numbers, by Box and Muller in float64: :math:`\mu + \sigma \sqrt{-2 \ln(1 - u)} \cos(2 \pi v)`.

    Args:
        key: int64 tensor of shape (2,).
        shape: of the result.
        mean: the mean.
        std: the standard deviation; of a complex number each part has :math:`\sigma / \sqrt 2`.
        dtype: of the result, floating or complex.
        stream: which stream of the key, as in :func:`~purestep.state.key.bits`.

    Example:
        >>> from purestep.state.key import random_key
        >>> normal(random_key(0), (1000,)).std().round(decimals=1)
        tensor(1.)
    """
    if dtype.is_complex:
        unit = torch.view_as_complex(normal(key, (*shape, 2), 0.0, math.sqrt(0.5), dtype=torch.float64, stream=stream))
    else:
        unit = draw(key, math.prod(shape), stream, 2, _normals).reshape(tuple(shape))
    return (mean + std * unit).to(dtype)


def bernoulli(
    key: Tensor,
    p: float | Tensor,
    shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bool,
    stream: int = 0,
) -> Tensor:
    """Ones with probability ``p``, zeros otherwise.

    Args:
        key: int64 tensor of shape (2,).
        p: a number, or a tensor that broadcasts to ``shape``, in [0, 1].
        shape: of the result; the shape of ``p`` by default.
        dtype: of the result.
        stream: which stream of the key, as in :func:`~purestep.state.key.bits`.

    Raises:
        ValueError: if a number ``p`` lies outside [0, 1].

    Example:
        >>> from purestep.state.key import random_key
        >>> bernoulli(random_key(0), 0.5, (4,))
        tensor([ True, False, False, False])
    """
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"p must lie in [0, 1], got {p}")
    target = tuple(p.shape if isinstance(p, Tensor) else ()) if shape is None else tuple(shape)
    word = bits(key, math.prod(target), stream=stream).reshape(target)
    if isinstance(p, Tensor):
        return (word.to(torch.float64) < p.to(torch.float64) * 2.0**32).to(dtype)
    return (word < round(p * 2**32)).to(dtype)
