"""Properties of a training step, for its users to prove of their own: pure, deterministic, resumable, indifferent.

Each ``assert_...`` takes a step, a state and a batch, or hypothesis strategies for them. What does not hold raises a
:class:`PropertyError` that names the concern, the leaf, the first differing element and what to do.
"""

from .check import Report, Result, check
from .compiled import assert_compiled_matches_eager, assert_compiles_once, assert_spec_stable
from .difference import Difference, first_difference, ulp_distance
from .digest import DigestTrace, compare_traces, digests
from .explain import Explanation, explain_difference
from .failure import NotAskedError, PropertyError
from .gradients import assert_gradients
from .keyed import assert_key_used
from .purity import assert_no_leak, assert_pure
from .repeat import assert_deterministic, assert_resumable
from .spread import assert_cut_invariant, assert_spread_invariant

__all__ = [
    "Difference",
    "DigestTrace",
    "Explanation",
    "NotAskedError",
    "PropertyError",
    "Report",
    "Result",
    "assert_compiled_matches_eager",
    "assert_compiles_once",
    "assert_cut_invariant",
    "assert_deterministic",
    "assert_gradients",
    "assert_key_used",
    "assert_no_leak",
    "assert_pure",
    "assert_resumable",
    "assert_spec_stable",
    "assert_spread_invariant",
    "check",
    "compare_traces",
    "digests",
    "explain_difference",
    "first_difference",
    "ulp_distance",
]
