"""Hypothesis strategies that the tests share."""

from itertools import pairwise

import hypothesis.strategies as st

backends = st.sampled_from(["eager", "aot_eager"])
seeds = st.integers(min_value=0, max_value=2**64 - 1)
orders = st.sampled_from(["tree", "fold"])
finite = st.floats(min_value=-8, max_value=8, allow_nan=False, allow_subnormal=False, width=32)


@st.composite
def cuts(draw, total):
    """A cut of ``total`` rows into consecutive parts, as a list of sizes."""
    points = sorted(draw(st.sets(st.integers(1, total - 1), max_size=total - 1)))
    edges = [0, *points, total]
    return [b - a for a, b in pairwise(edges)]


def shapes(max_dims=3, max_side=4):
    return st.lists(st.integers(1, max_side), max_size=max_dims).map(tuple)
