"""Philox4x32-10: a counter-based generator, written in int64 tensor arithmetic.

Reference:
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["Words", "halves", "philox4x32"]

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)  # less 2**32: see _multiply
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox: four words of counter and two of key to four random words.

    Args:
        counter: four int64 tensors holding unsigned 32-bit words, shapes that broadcast.
        key: two of the same.

    Returns:
        Four int64 tensors of unsigned 32-bit words.
    """
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for turn in range(_ROUNDS):
        (high0, low0), (high1, low1) = _multiply(x0, _MULTIPLIERS[0]), _multiply(x2, _MULTIPLIERS[1])
        x0 = (high1 ^ x1 ^ (k0 + turn * _WEYL[0])) & _MASK
        x2 = (high0 ^ x3 ^ (k1 + turn * _WEYL[1])) & _MASK
        x1, x3 = low1, low0
    return x0, x1 & _MASK, x2, x3 & _MASK


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High word of ``word * (factor + 2**32)``, and a number whose low 32 bits are its low word.

    The plain product of two words overflows int64, which compiled C++ leaves undefined (seen: other bits). With the factor
    less 2**32, of magnitude below 2**30, nothing overflows, and adding the word to the high half makes up for it.
    """
    product = word * factor
    return (product >> 32) + word, product


def halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of an int64 tensor."""
    return value & _MASK, (value >> 32) & _MASK
