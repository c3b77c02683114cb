r"""Keys: explicit random state, and the random words drawn from it.

A key is an int64 tensor of shape ``(2,)``: a seed and an offset, the layout of ``torch.func._random``. Numbers come from
Philox4x32-10, a counter-based generator: the n-th number is a function of (key, n) alone, written in int64 tensor
arithmetic, so that it has the same bits eager and compiled, on every device, and however the work is spread.

A key is used once: either drawn from, or folded and split into further keys.

Reference:
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .philox import Words, halves, philox4x32
from .torch_private import is_tracing

__all__ = ["bits", "draw", "fold_in", "random_key", "split"]

_FOLD = 1 << 31  # set in the counter's last word by fold_in, never by a draw: the two cannot meet


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
        data: a non-negative int below 2**62, or an integer tensor of any shape.

    Returns:
        A key; for a tensor of data one key per element, of shape ``(*data.shape, 2)``.

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
    low, high = halves(data.to(torch.int64))
    words = philox4x32((*halves(key[1]), low, high | _FOLD), halves(key[0]))
    # The offset keeps 62 bits: a stream can be read on from it without overflow.
    return torch.stack([words[0] | (words[1] << 32), (words[2] | (words[3] << 32)) & (2**62 - 1)], dim=-1)


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
    return fold_in(key, torch.arange(count, dtype=torch.int64, device=key.device))


def _words(key: Tensor, blocks: Tensor, stream: int) -> Words:
    """The four words of each of these blocks of a key's stream."""
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    return philox4x32((*halves(key[1] + blocks), zero + stream, zero), halves(key[0]))


def draw(key: Tensor, count: int, stream: int, lanes: int, join: Callable[[Words], tuple[Tensor, ...]]) -> Tensor:
    """``count`` numbers, ``lanes`` of them from each block, in the order of the stream.

    Eagerly each block is computed once. In a graph each number computes its own block and picks its lane: one kernel
    without an intermediate in memory, which compiles several times faster than ``lanes`` joined ones.
    """
    _check_key(key)
    if not (is_tracing() or torch.compiler.is_compiling()):
        blocks = torch.arange(-(-count // lanes), dtype=torch.int64, device=key.device)
        return torch.stack(join(_words(key, blocks, stream)), dim=-1).reshape(-1)[:count]
    index = torch.arange(count, dtype=torch.int64, device=key.device)
    values = join(_words(key, index // lanes, stream))
    picked = values[0]
    for lane in range(1, lanes):
        picked = torch.where(index % lanes == lane, values[lane], picked)
    return picked


def bits(key: Tensor, count: int, *, stream: int = 0) -> Tensor:
    """``count`` random words.

    Args:
        key: int64 tensor of shape (2,).
        count: how many.
        stream: below 2**31; the streams of a key are independent of each other.

    Returns:
        int64 tensor of shape (count,), each in [0, 2**32).

    Example:
        >>> bits(random_key(0), 2)
        tensor([1713891541, 3781805453])
    """
    return draw(key, count, stream, 4, lambda words: words)
