r"""Keys: explicit random state, and the numbers drawn from it.

A key is an int64 tensor of shape ``(2,)``: a seed and an offset, the layout of ``torch.func._random``. Numbers come from
Philox4x32-10, a counter-based generator: the n-th number is a function of (key, n) alone, written in int64 tensor
arithmetic, so that it has the same bits eager and compiled, on every device, and however the work is spread.

A key is used once: either drawn from, or folded and split into further keys.

Reference:
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bernoulli", "bits", "fold_in", "normal", "philox4x32", "random_key", "split", "uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_FOLD = 1 << 31  # set in the counter's last word by fold_in, never by a draw: the two cannot meet

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def random_key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """The key of a seed.

    Args:
        seed: an integer of 64 bits; a negative one is taken modulo 2**64.
        device: where the key lives; the CPU by default.

    Returns:
        int64 tensor of shape (2,).

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it has more than 64 bits.

    Example:
        >>> random_key(7)
        tensor([7, 0])
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r} of type {type(seed).__name__}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.tensor([signed, 0], dtype=torch.int64, device=device or "cpu")


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox: four words of counter and two of key to four random words.

    Args:
        counter: four int64 tensors holding unsigned 32-bit words, shapes that broadcast.
        key: two of the same.

    Returns:
        Four int64 tensors of unsigned 32-bit words.
    """
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for round_index in range(_ROUNDS):
        if round_index:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # The product of two 32-bit words wraps into int64 without losing a bit; the shift is arithmetic, hence the mask.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
    return x0, x1, x2, x3


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    return value & _MASK, (value >> 32) & _MASK


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"key must be an int64 tensor of shape (2,), got {key!r}; make one with random_key(seed)")
    if key.dtype != torch.int64 or key.shape != (2,):
        raise ValueError(
            f"key must be an int64 tensor of shape (2,), got {key.dtype} of shape {tuple(key.shape)}; "
            "make one with random_key(seed)"
        )


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and an integer: other integers give independent keys.

    Args:
        key: int64 tensor of shape (2,).
        data: a non-negative int below 2**62, or a 0-d integer tensor.

    Returns:
        A key.

    Raises:
        ValueError: if ``key`` is not a key or ``data`` is negative.

    Example:
        >>> bool((fold_in(random_key(0), 1) != fold_in(random_key(0), 2)).all())
        True
    """
    _check_key(key)
    if isinstance(data, int):
        if not 0 <= data < 2**62:
            raise ValueError(f"data must be a non-negative integer below 2**62, got {data}")
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    low, high = _halves(data.to(torch.int64))
    words = philox4x32((*_halves(key[1]), low, high | _FOLD), _halves(key[0]))
    return torch.stack([words[0] | (words[1] << 32), words[2] | (words[3] << 32)])


def split(key: Tensor, count: int = 2) -> Tensor:
    """``count`` independent keys: ``split(key, n)[i]`` equals ``fold_in(key, i)``.

    Returns:
        int64 tensor of shape (count, 2).

    Raises:
        ValueError: if ``count`` is not positive.

    Example:
        >>> split(random_key(0), 3).shape
        torch.Size([3, 2])
    """
    if count < 1:
        raise ValueError(f"count must be positive, got {count}")
    return torch.stack([fold_in(key, i) for i in range(count)])


def _words(key: Tensor, count: int) -> Words:
    """Four tensors of ``count`` words each, blocks ``offset .. offset + count - 1`` of the key's stream."""
    _check_key(key)
    position = key[1] + torch.arange(count, dtype=torch.int64, device=key.device)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    return philox4x32((*_halves(position), zero, zero), _halves(key[0]))


def bits(key: Tensor, count: int) -> Tensor:
    """``count`` random words.

    Returns:
        int64 tensor of shape (count,), each in [0, 2**32).

    Example:
        >>> bits(random_key(0), 2)
        tensor([1713891541, 3782870413])
    """
    return torch.stack(_words(key, -(-count // 4)), dim=-1).reshape(-1)[:count]


def _fractions(key: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Two float64 numbers of 53 bits, uniform in [0, 1), from each of ``blocks`` blocks."""
    w0, w1, w2, w3 = _words(key, blocks)
    first, second = (w0 << 21) | (w1 >> 11), (w2 << 21) | (w3 >> 11)
    return first.to(torch.float64) * 2.0**-53, second.to(torch.float64) * 2.0**-53


def _interleave(pair: tuple[Tensor, Tensor], shape: Sequence[int]) -> Tensor:
    return torch.stack(pair, dim=-1).reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def uniform(
    key: Tensor,
    shape: Sequence[int],
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Numbers uniform in [low, high): :math:`low + (high - low) u`.

    The fraction has 24 bits for dtypes of up to 32 bits and 53 for float64.

    Args:
        key: int64 tensor of shape (2,).
        shape: of the result.
        low: lower bound, included.
        high: upper bound, excluded up to rounding.
        dtype: of the result, a floating dtype.

    Example:
        >>> uniform(random_key(0), (2,))
        tensor([0.3990, 0.8805])
    """
    count = math.prod(shape)
    if dtype == torch.float64:
        value = _interleave(_fractions(key, -(-count // 2)), shape)
    else:
        value = ((bits(key, count) >> 8).to(torch.float32) * 2.0**-24).reshape(tuple(shape))
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
) -> Tensor:
    r"""Normal numbers, by Box and Muller in float64: :math:`\mu + \sigma \sqrt{-2 \ln(1 - u)} \cos(2 \pi v)`.

    Args:
        key: int64 tensor of shape (2,).
        shape: of the result.
        mean: the mean.
        std: the standard deviation.
        dtype: of the result, a floating dtype.

    Example:
        >>> normal(random_key(0), (1000,)).std().round(decimals=1)
        tensor(1.)
    """
    u, v = _fractions(key, -(-math.prod(shape) // 2))
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-u)), (2.0 * math.pi) * v
    unit = _interleave((radius * torch.cos(angle), radius * torch.sin(angle)), shape)
    return (mean + std * unit).to(dtype)


def bernoulli(
    key: Tensor, p: float | Tensor, shape: Sequence[int] | None = None, *, dtype: torch.dtype = torch.bool
) -> Tensor:
    """Ones with probability ``p``, zeros otherwise.

    Args:
        key: int64 tensor of shape (2,).
        p: a number, or a tensor that broadcasts to ``shape``, in [0, 1].
        shape: of the result; the shape of ``p`` by default.
        dtype: of the result.

    Raises:
        ValueError: if a number ``p`` lies outside [0, 1].

    Example:
        >>> bernoulli(random_key(0), 0.5, (4,))
        tensor([ True,  True, False, False])
    """
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"p must lie in [0, 1], got {p}")
    target = tuple(p.shape if isinstance(p, Tensor) else ()) if shape is None else tuple(shape)
    word = bits(key, math.prod(target)).reshape(target)
    if isinstance(p, Tensor):
        return (word.to(torch.float64) < p.to(torch.float64) * 2.0**32).to(dtype)
    return (word < round(p * 2**32)).to(dtype)
