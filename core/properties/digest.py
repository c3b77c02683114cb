"""Digests of a run, leaf by leaf: small enough to keep for every update, and to be compared across machines."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...state.record import TrainState
from ...state.tree import Tree, as_tensors, leaves_with_paths

__all__ = ["DigestTrace", "compare_traces", "digests"]


def digests(tree: Tree, root: str = "") -> dict[str, str]:
    """A digest of each leaf's dtype, shape and bytes (little-endian), by path: BLAKE2 of 64 bits, in hexadecimal.

    Example:
        >>> digests({"w": torch.zeros(2)})["['w']"]
        '8bd79421def4598b'
    """
    return {path: _digest(leaf) for path, leaf in leaves_with_paths(as_tensors(tree), root)}


def _digest(leaf: Any) -> str:
    made = hashlib.blake2b(digest_size=8)
    if not isinstance(leaf, Tensor):
        made.update(repr((type(leaf).__name__, leaf)).encode())
        return made.hexdigest()
    dense = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
    made.update(repr((str(leaf.dtype), tuple(leaf.shape))).encode())
    flat = dense.resolve_conj().contiguous().cpu().reshape(-1)
    if sys.byteorder == "big":
        raise RuntimeError("digests are of little-endian bytes; this machine is big-endian")
    made.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return made.hexdigest()


class DigestTrace:
    """A file of a run's digests, one line per kept update, to be compared with another run's.

    Args:
        path: the file; an existing one is continued, lines from the resumed update on are replaced.
        digest_every: keep one update in so many.

    Raises:
        ValueError: if ``digest_every`` is not a positive int.

    Example:
        >>> import tempfile, os, purestep as ps
        >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
        >>> trace = DigestTrace(path, digest_every=10)
        >>> # in the loop, after each step: trace.add(state)
    """

    def __init__(self, path: str | Path, *, digest_every: int = 1) -> None:
        if isinstance(digest_every, bool) or not isinstance(digest_every, int) or digest_every < 1:
            raise ValueError(f"digest_every must be a positive int, got {digest_every!r}")
        self.path, self.digest_every = Path(path), digest_every
        self._last: int | None = None

    def add(self, state: TrainState) -> None:
        """Keep the digests of a state if its number of calls is due. Reads every value of the state."""
        call = int(state.counters.batches)
        if call % self.digest_every:
            return
        if self._last is None or call <= self._last:  # the first time, and where a run went back
            kept = [line for line in _lines(self.path) if line["call"] < call]
            self.path.write_text("".join(map(_written, kept)), encoding="utf-8")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_written({"call": call, "digests": digests(state, "state")}))
        self._last = call


def _written(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a trace; a last one that a crash cut short does not count."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line]


def compare_traces(one: str | Path, other: str | Path) -> str | None:
    """Where two runs part, in words: the first call and leaf whose digests differ; ``None`` if they agree.

    Raises:
        ValueError: if a file is missing or the two have no call in common.
    """
    for path in (one, other):
        if not Path(path).exists():
            raise ValueError(f"there is no trace {path}; a run writes one with DigestTrace")
    ours, theirs = ({line["call"]: line["digests"] for line in _lines(Path(path))} for path in (one, other))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError(f"{one} and {other} have no call in common: {sorted(ours)[:3]} and {sorted(theirs)[:3]}")
    agreed = 0
    for call in common:
        if ours[call].keys() != theirs[call].keys():
            names = sorted(ours[call].keys() ^ theirs[call].keys())
            return f"at call {call} only one run has {names[0]}"
        wrong = [path for path in ours[call] if ours[call][path] != theirs[call][path]]
        if wrong:
            return (
                f"the runs agree up to call {agreed} and differ at call {call}: {len(wrong)} of {len(ours[call])} leaves, "
                f"first {wrong[0]}"
            )
        agreed = call
    return None
