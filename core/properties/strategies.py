"""Hypothesis strategies for what a step takes: trees, batches, optimizers, schedules, limits. Needs ``hypothesis``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from ...state.key import random_key
from ...state.record import TrainState
from ...state.tree import as_tensors, map_leaves
from ...steps import schedules as made
from ...steps.adam import adam, adamw
from ...steps.sgd import sgd
from ...steps.transform import Transformation

__all__ = [
    "batches",
    "cuts",
    "keys",
    "limits",
    "optimizers",
    "ragged",
    "schedules",
    "seeds",
    "states",
    "tensors",
    "trees",
]

_FLOATS = (torch.float32, torch.float64)

seeds: SearchStrategy[int] = st.integers(min_value=0, max_value=2**64 - 1)
"""Seeds of a run: any 64 bits."""


def keys() -> SearchStrategy[Tensor]:
    """Keys of any seed."""
    return seeds.map(random_key)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: Sequence[int] | SearchStrategy[Any] | None = None,
    dtype: torch.dtype | SearchStrategy[Any] | None = None,
    *,
    low: float = -4.0,
    high: float = 4.0,
) -> Tensor:
    """Tensors of small multiples of 1/16, which every floating dtype holds exactly.

    Args:
        draw: given by hypothesis.
        shape: of the tensor, or a strategy for shapes; up to three dimensions by default.
        dtype: of the tensor, or a strategy for dtypes; float32 or float64 by default.
        low: smallest element.
        high: largest element.
    """
    shape = st.lists(st.integers(1, 4), max_size=3).map(tuple) if shape is None else shape
    size = draw(shape) if isinstance(shape, SearchStrategy) else tuple(shape)
    kind = draw(st.sampled_from(_FLOATS) if dtype is None else dtype) if not isinstance(dtype, torch.dtype) else dtype
    count = int(torch.Size(size).numel())
    numbers = draw(st.lists(st.integers(int(low * 16), int(high * 16)), min_size=count, max_size=count))
    return (torch.tensor(numbers, dtype=torch.float64).reshape(size) / 16).to(kind)


def trees(leaves: SearchStrategy[Any] | None = None) -> SearchStrategy[Any]:
    """Trees of dicts, lists, tuples and absent leaves, of the given leaves or of small tensors."""
    own = tensors() if leaves is None else leaves
    return st.recursive(
        own | st.none(),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )


@st.composite
def batches(
    draw: st.DrawFn,
    like: Any,
    *,
    rows: int | SearchStrategy[int] | None = None,
    integers: tuple[int, int] = (0, 1),
    masked: int | None = None,
) -> Any:
    """Batches of the structure of an example: other numbers, and other numbers of rows.

    Args:
        draw: given by hypothesis.
        like: an example batch; leaves that are not tensors are kept.
        rows: how many rows, or a strategy for that; those of the example by default.
        integers: the smallest and the largest value of integer leaves.
        masked: a value that some elements of integer leaves are set to, such as -100 for labels that do not count.
    """
    count = draw(rows) if isinstance(rows, SearchStrategy) else rows

    def another(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        shape = (leaf.shape[0] if count is None else count, *leaf.shape[1:])
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.randn(shape, generator=generator, dtype=leaf.dtype)
        if leaf.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
        values = torch.randint(integers[0], integers[1] + 1, shape, generator=generator).to(leaf.dtype)
        share = 0.0 if masked is None else draw(st.sampled_from([0.0, 0.3, 0.9]))
        return torch.where(torch.rand(shape, generator=generator) < share, masked or 0, values).to(leaf.dtype)

    return map_leaves(another, as_tensors(like))


@st.composite
def ragged(draw: st.DrawFn, *, features: int = 2, packed: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Sequences of different lengths: a list of tensors (length, features), or one ``PackedSequence``."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    rows = [draw(tensors((length, features), dtype)) for length in lengths]
    return pack_sequence(rows, enforce_sorted=False) if packed else rows


def states(init: Callable[[int], TrainState]) -> SearchStrategy[TrainState]:
    """States of generated seeds: ``init(seed)`` makes one, such as ``lambda seed: ps.init(model, step, seed=seed)``."""
    return seeds.map(init)


def schedules(peak: float = 0.1, steps: int = 10) -> SearchStrategy[Any]:
    """Rates: numbers and every schedule, of values up to ``peak``."""
    value = st.floats(0.0, peak, allow_subnormal=False)
    return st.one_of(
        value,
        st.builds(made.constant_schedule, value),
        st.builds(made.linear, value, value, st.integers(1, steps)),
        st.builds(made.cosine, value, st.integers(1, steps), value),
        st.builds(made.warmup_cosine, value, st.just(2), st.integers(3, steps)),
        st.builds(made.piecewise, value, st.dictionaries(st.integers(1, steps), value, max_size=3)),
    )


def optimizers(peak: float = 0.1) -> SearchStrategy[Transformation]:
    """Every optimizer, with generated rates and options."""
    decay = st.sampled_from([0.0, 0.01])
    heavy = st.builds(sgd, schedules(peak), momentum=st.just(0.9), nesterov=st.booleans(), weight_decay=decay)
    return st.one_of(
        st.builds(sgd, schedules(peak), weight_decay=decay),
        heavy,
        st.builds(adam, schedules(peak), amsgrad=st.booleans(), weight_decay=decay),
        st.builds(adamw, schedules(peak), weight_decay=decay),
    )


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    """A cut of ``total`` rows into consecutive parts, as a list of sizes."""
    points = sorted(draw(st.sets(st.integers(1, total - 1), max_size=total - 1)))
    edges = [0, *points, total]
    return [after - before for before, after in itertools.pairwise(edges)]


def limits(most: int = 50) -> SearchStrategy[dict[str, int | None]]:
    """Limits of a loop: updates, batches, samples and epochs, each a small number or absent."""
    one = st.none() | st.integers(0, most)
    return st.fixed_dictionaries(dict.fromkeys(("updates", "batches", "samples", "epochs"), one))
