"""A contest: each peer in a process of its own, in turns, on the same workload.

Their thread pools stay out of each other's way there, and each process has its own memory to be measured.
"""

import multiprocessing
import resource
import statistics
import time
import traceback
from importlib import import_module

import attrs

__all__ = ["Entry", "Peer", "contest"]

CHECKED = 20  # steps whose losses must agree before anything is timed
TOLERANCE = 2e-3


@attrs.frozen
class Peer:
    """A way to train.

    Attributes:
        name: as in tables.
        home: module and function, ``"module:function"``, that give ``step(batch) -> loss`` for a workload.
        prepare: module and function that turn a batch of torch tensors into the peer's own.
        scan_home: the same as ``home`` where several steps are one call; without it they are a loop.
        scan_prepare: the same as ``prepare``, for a list of batches.
    """

    name: str
    home: str
    prepare: str = ""
    scan_home: str = ""
    scan_prepare: str = ""


@attrs.define
class Entry:
    """What a peer came to.

    Attributes:
        peer: its name.
        first: seconds to build it and take the first step, compiling included, imports not.
        losses: of the first steps.
        rounds: seconds per step, one number per round.
        peak: MiB of memory the process needed at most beyond what its imports took.
        trouble: why it has no figures.
    """

    peer: str
    first: float = 0.0
    losses: list[float] = attrs.field(factory=list)
    rounds: list[float] = attrs.field(factory=list)
    peak: float = 0.0
    trouble: str = ""

    @property
    def median(self):
        """Seconds per step."""
        return statistics.median(self.rounds)


def contest(workload, peers, *, rounds=9, block=0.25):
    """Time the peers in turns: every round gives each of them a block of steps.

    Args:
        workload: what to train.
        peers: who.
        rounds: how many turns each has.
        block: seconds that a turn takes at least.

    Returns:
        An ``Entry`` per peer; those that cannot train the workload, or compute something else, say why.
    """
    contestants = [_Contestant(peer, workload) for peer in peers]
    try:
        _refuse_other_maths([c.entry for c in contestants])
        fit = [c for c in contestants if not c.entry.trouble]
        for c in fit:
            c.steps = max(1, round(block / c.ask("time", 3)))
        for _ in range(rounds):
            for c in fit:
                c.entry.rounds.append(c.ask("time", c.steps) / workload.steps)
        for c in fit:
            c.entry.peak = c.ask("peak")
        return [c.entry for c in contestants]
    finally:
        for c in contestants:
            c.close()


def _refuse_other_maths(entries):
    """A peer whose losses part from the first one's solves another problem."""
    base = next((entry.losses for entry in entries if entry.losses), [])
    for entry in entries:
        apart = max((abs(a - b) / max(abs(b), 1e-2) for a, b in zip(entry.losses, base, strict=True)), default=0.0)
        if entry.losses and not apart <= TOLERANCE:
            entry.trouble = f"its losses part from {entries[0].peer}'s by {apart:.1e}"


class _Contestant:
    """The parent's end of a peer's process."""

    def __init__(self, peer, workload):
        context = multiprocessing.get_context("spawn")
        self.line, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, peer, workload.name), daemon=True)
        self.process.start()
        self.entry, self.steps = Entry(peer.name), 1
        try:
            self.entry.first, self.entry.losses = self._answer()
        except (RuntimeError, EOFError) as error:
            self.entry.trouble = str(error) or "its process ended"

    def ask(self, *request):
        self.line.send(request)
        return self._answer()

    def _answer(self):
        kind, value = self.line.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def close(self):
        self.line.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _serve(line, peer, name):
    """A peer's process: build it, take the first steps, then answer what it is asked until nobody asks."""
    try:
        step, batch = _built(peer, name)
        before = _peak()
        start = time.perf_counter()
        losses = [float(step(batch))]
        first = time.perf_counter() - start
        losses += [float(step(batch)) for _ in range(CHECKED - 1)]
        line.send(("ok", (first, losses)))
    except Exception as error:
        line.send(("error", f"{type(error).__name__}: {error}".splitlines()[0]))
        traceback.print_exc()
        return
    while True:
        try:
            request, *args = line.recv()
        except EOFError:
            return
        line.send(("ok", _seconds(step, batch, *args) if request == "time" else _peak() - before))


def _built(peer, name):
    from workloads import WORKLOADS

    workload = WORKLOADS[name]
    batches = workload.batches(workload.steps)
    if workload.steps > 1 and peer.scan_home:
        return _named(peer.scan_home)(workload), _named(peer.scan_prepare)(batches) if peer.scan_prepare else batches
    batches = [_named(peer.prepare)(batch) if peer.prepare else batch for batch in batches]
    step = _named(peer.home)(workload)
    if workload.steps == 1:
        return step, batches[0]
    return (lambda several: [step(batch) for batch in several][-1]), batches


def _named(path):
    module, name = path.split(":")
    return getattr(import_module(module), name)


def _seconds(step, batch, count):
    import torch
    from torch.utils.benchmark import Timer

    def block():
        for _ in range(count):
            loss = step(batch)
        getattr(loss, "block_until_ready", lambda: None)()  # JAX hands out results before they are there

    timer = Timer("block()", globals={"block": block}, num_threads=torch.get_num_threads())
    return timer.timeit(1).mean / count


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
