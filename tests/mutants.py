"""Planted faults: copies of concerns, losses and optimizers with one fault each, and the property that must catch it.

Run as a script it prints how many are caught.
"""

import itertools
import os
import random
import time

import attrs
import numpy as np
import torch
from torch import nn
from torch.nn import functional

import purestep as ps
from purestep.core.phase import Phase
from purestep.state.sums import Sums
from purestep.steps.accumulate import Accumulate, add_sums
from purestep.steps.backward import Backward
from purestep.steps.clip import Clip
from purestep.steps.forward import Forward


def batch_of(rows=8, masked=0):
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    y[:masked] = -100
    return x, y


def network(dropout=0.0, norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8, momentum=0.5) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def good_loss(model, batch, key):
    x, y = batch
    logits, valid = model(x), y != -100
    total = functional.cross_entropy(logits, y, reduction="sum", ignore_index=-100)
    right = ((logits.argmax(-1) == y) & valid).sum()
    return ps.Loss(total, weight=valid.sum(), metrics={"accuracy": ps.Sum(right, valid.sum())})


@attrs.frozen
class Setup:
    """A step with all that a property needs."""

    step: ps.Step
    state: ps.TrainState
    batch: object
    batches: tuple = ()


def setup(
    loss=good_loss, *, model=None, split=4, backward=None, accumulate=None, before=(), micro=(), sums=(), grads=None,
    tx=None, after=(), forward=None, batch=None, batches=(), phase=None, dropout=0.0, norm=False,
):  # fmt: skip
    model = model or network(dropout, norm)
    head = (ps.split_batch(split),) if split else ()
    step = ps.compose(
        *before, *head, *micro, (forward or ps.forward)(loss, model), backward or ps.backward(), *sums,
        accumulate or ps.accumulate(), *((ps.clip(max_norm=1.0),) if grads is None else grads),
        ps.step(tx or ps.adamw(ps.warmup_cosine(peak=1e-2, warmup=2, total=9))), *after,
    )  # fmt: skip
    state = ps.init(model, step)
    if phase is not None:
        fields = {field.name: getattr(step.phases[0], field.name) for field in attrs.fields(Phase)}
        step = attrs.evolve(step, phases=(phase(**fields),))
    return Setup(step, state, batch_of() if batch is None else batch, tuple(batches))


# Faults in accumulation.


class MeanOfMeans(Accumulate):
    """Each microbatch's gradient is divided by its own weight, and the means are averaged."""

    def __call__(self, parts):
        return super().__call__([_mean_of(part) for part in parts])

    def local(self, one, params, microbatches, keys, buffers):
        parts = [one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)]
        return super().__call__([_mean_of(part) for part in parts])


def _mean_of(sums):
    grads = ps.map_leaves(lambda g: g / sums.weight, sums.grads)
    return sums.replace(grads=grads, loss=sums.loss / sums.weight, weight=torch.ones((), dtype=torch.float64))


class WrongTail(Accumulate):
    """Every microbatch is taken to have as many rows as the first."""

    def local(self, one, params, microbatches, keys, buffers):
        first = len(microbatches[0][1])
        parts = [one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)]
        return super().__call__([part.replace(weight=torch.full_like(part.weight, first)) for part in parts])


class AtLeastOne(Accumulate):
    """A microbatch without a valid label counts as one."""

    def local(self, one, params, microbatches, keys, buffers):
        parts = [one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)]
        return super().__call__([part.replace(weight=part.weight.clamp(min=1)) for part in parts])


class MetricsOfMeans(Accumulate):
    """Metrics are averaged over the microbatches."""

    def local(self, one, params, microbatches, keys, buffers):
        parts = [one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)]
        return super().__call__(
            [p.replace(metrics={n: ps.Sum(m.mean(), 1) for n, m in p.metrics.items()}) for p in parts]
        )


class FoldForTree(Accumulate):
    """Calls itself a tree and adds one after the other."""

    def __call__(self, parts):
        total = parts[0]
        for part in parts[1:]:
            total = add_sums(total, part)
        return total

    def local(self, one, params, microbatches, keys, buffers):
        return self([one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)])


class DropsTheLast(Accumulate):
    """Forgets the last microbatch."""

    def local(self, one, params, microbatches, keys, buffers):
        kept = microbatches[:-1] or microbatches
        return super().local(one, params, kept, keys, buffers)


class HalfPrecision(Accumulate):
    """Adds in bfloat16."""

    def local(self, one, params, microbatches, keys, buffers):
        parts = [one(params, part, key, dict(buffers)) for part, key in zip(microbatches, keys, strict=True)]
        small = [p.replace(grads=ps.map_leaves(lambda g: g.bfloat16().float(), p.grads)) for p in parts]
        return super().__call__(small)


# Faults in the randomness.


class OneKey(Phase):
    """Every microbatch gets the update's key."""

    def local(self, state, batch, *, first=0, rank=0):
        parts = self.split(batch)
        key = ps.fold_in(state.key, state.counters.updates + state.counters.skips)
        return self.accumulate.local(self._one, state.params, parts, key.repeat(len(parts), 1), state.buffers)


class OneUpdate(Phase):
    """Every update gets the run's key."""

    def local(self, state, batch, *, first=0, rank=0):
        zero = ps.Counters.zero()
        return super().local(state.replace(counters=zero), batch, first=first, rank=rank)


class LocalIndex(Phase):
    """The key is folded with the microbatch's index on its own process."""

    def local(self, state, batch, *, first=0, rank=0):
        return super().local(state, batch)


def noisy(draw):
    def loss(model, batch, key):
        made = good_loss(model, batch, key)
        return made.replace(total=made.total * (1.0 + 1e-3 * draw()))

    return loss


# Faults in purity.


class InPlaceBuffers(Forward):
    """The module writes into the state's buffers."""

    def bound(self, params, key=None, buffers=None):
        return self._with(params, buffers)

    def _with(self, params, buffers):
        import contextlib

        @contextlib.contextmanager
        def held():
            with self.template.bound(params, buffers) as module:
                yield lambda microbatch, carry=None: self.loss(module, microbatch, None).replace(buffers=dict(buffers))

        return held()


def in_place_forward(loss, model):
    plain = ps.forward(loss, model)
    return InPlaceBuffers(plain.loss, plain.template, plain.takes_carry)


def in_place_batch(model, batch, key):
    batch[0].sub_(batch[0].mean())
    return good_loss(model, batch, key)


def clamped_weights(model, batch, key):
    model[0].weight.data.clamp_(-0.1, 0.1)
    return good_loss(model, batch, key)


def touches(action):
    def loss(model, batch, key):
        action()
        return good_loss(model, batch, key)

    return loss


_serial = itertools.count()


def in_place_optimizer():
    def update(grads, opt_state, params, hyper=None):
        for name, grad in grads.items():
            opt_state[name].mul_(0.9).add_(grad)
        return ps.map_leaves(lambda m: -0.1 * m, opt_state), opt_state

    return ps.Transformation(lambda params: ps.map_leaves(torch.zeros_like, params), update)


def aliasing_clocks(state):
    c = state.counters
    return state.replace(counters=ps.Counters(c.updates, c.batches, c.samples, c.skips, c.batches))


def aliasing_metric(grads):
    return grads, {"first": grads["0.bias"][0], "again": grads["0.bias"][0]}


# Faults in time: what one step leaves to the next.


def remembering():
    kept = []

    def loss(model, batch, key):
        made = good_loss(model, batch, key)
        kept.append(made.total)
        return made

    return loss


def counting_rate():
    calls = itertools.count()
    return ps.sgd(lambda count: 0.1 / (1 + next(calls)))


def alternating():
    calls = itertools.count()

    def loss(model, batch, key):
        made = good_loss(model, batch, key)
        return made.replace(total=made.total * (2.0 if next(calls) % 8 < 4 else 1.0))

    return loss


# Faults in the form.


def wider(state):
    return state.replace(params={**state.params, "0.bias": state.params["0.bias"].double()})


def longer(state):
    return state.replace(window=ps.RunningWindow.empty(7))


def closing_over():
    weights = torch.tensor([1.0, 2.0, 3.0])

    def loss(model, batch, key):
        return ps.Loss(functional.cross_entropy(model(batch[0]), batch[1], weights, reduction="sum"), len(batch[1]))

    return loss


def branching(model, batch, key):
    made = good_loss(model, batch, key)
    return made.replace(total=made.total * 2.0) if float(made.total.detach()) > 1e9 else made


def scaled_by_number(model, batch, key):
    return good_loss(model, batch["data"], key).replace(
        total=good_loss(model, batch["data"], key).total * batch["rate"]
    )


# Faults in the gradients.


class Halved(torch.autograd.Function):
    """The identity with a wrong backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def detached(model, batch, key):
    hidden = model[0](batch[0]).detach()
    total = functional.cross_entropy(model[4](hidden) + 0.0 * model[0].bias.sum(), batch[1], reduction="sum")
    return ps.Loss(total, weight=len(batch[1]))


def wrong_backward(model, batch, key):
    hidden = Halved.apply(model[0](batch[0]))
    return ps.Loss(functional.cross_entropy(model[4](hidden.tanh()), batch[1], reduction="sum"), len(batch[1]))


class Doubling(Backward):
    """Adds each gradient twice."""

    def __call__(self, *given, **options):
        sums = super().__call__(*given, **options)
        return sums.replace(grads=ps.map_leaves(lambda g: g + g, sums.grads))


def clipped_early(sums: Sums) -> Sums:
    return sums.replace(grads=Clip(1.0, None, 2.0, "skip", None)(sums.grads)[0])


def divided_early(sums: Sums) -> Sums:
    return sums.replace(grads=ps.map_leaves(lambda g: g / sums.weight, sums.grads))


def mean_loss(model, batch, key):
    return ps.Loss(functional.cross_entropy(model(batch[0]), batch[1]), weight=1)


GENERATOR = np.random.default_rng()
UNEVEN = batch_of(7)

MUTANTS = {
    "mean of means": ("cut invariant", lambda: setup(accumulate=MeanOfMeans("tree", (("*", "mean"),), 4), batch=UNEVEN)),
    "a mean for a sum": ("cut invariant", lambda: setup(mean_loss, batch=UNEVEN)),
    "wrong tail divisor": ("cut invariant", lambda: setup(accumulate=WrongTail("tree", (("*", "mean"),), 4), batch=UNEVEN)),
    "empty counts as one": (
        "cut invariant", lambda: setup(accumulate=AtLeastOne("tree", (("*", "mean"),), 4), batch=batch_of(8, masked=4)),
    ),
    "metrics of means": (
        "cut invariant", lambda: setup(accumulate=MetricsOfMeans("tree", (("*", "mean"),), 4), batch=UNEVEN),
    ),
    "clip before the division": ("cut invariant", lambda: setup(sums=(clipped_early,))),
    "divide twice": ("cut invariant", lambda: setup(sums=(divided_early,))),
    "last microbatch lost": ("cut invariant", lambda: setup(accumulate=DropsTheLast("tree", (("*", "mean"),), 4))),
    "sums in bfloat16": ("cut invariant", lambda: setup(accumulate=HalfPrecision("tree", (("*", "mean"),), 4))),
    "fold instead of tree": (
        "spread invariant", lambda: setup(accumulate=FoldForTree("tree", (("*", "mean"),), 9), split=8, batch=batch_of(16)),
    ),
    "key by local index": ("spread invariant", lambda: setup(phase=LocalIndex, dropout=0.5)),
    "buffers in sequence": (
        "spread invariant", lambda: setup(accumulate=ps.accumulate(buffers="sequential"), norm=True),
    ),
    "one key for all microbatches": ("drawn from the key", lambda: setup(phase=OneKey, dropout=0.5)),
    "one key for all updates": ("drawn from the key", lambda: setup(phase=OneUpdate, dropout=0.5)),
    "numpy's generator": ("drawn from the key", lambda: setup(noisy(lambda: float(np.random.rand())))),
    "python's generator": ("drawn from the key", lambda: setup(noisy(random.random))),
    "a generator of torch's": (
        "drawn from the key", lambda: setup(noisy(lambda: torch.rand((), generator=torch.Generator()))),
    ),
    "a generator of its own": ("deterministic", lambda: setup(noisy(lambda: float(GENERATOR.random())))),
    "the clock": ("deterministic", lambda: setup(noisy(lambda: time.perf_counter() % 1.0))),
    "in-place buffers": ("pure", lambda: setup(forward=in_place_forward, norm=True)),
    "in-place batch": ("pure", lambda: setup(in_place_batch)),
    "in-place weights": ("pure", lambda: setup(clamped_weights)),
    "in-place optimizer": ("pure", lambda: setup(tx=in_place_optimizer())),
    "environment": ("pure", lambda: setup(touches(lambda: os.environ.__setitem__("PLANTED", str(next(_serial)))))),
    "threads": ("pure", lambda: setup(touches(lambda: torch.set_num_threads(1 + torch.get_num_threads() % 2)))),
    "aliasing leaf": ("pure", lambda: setup(after=(aliasing_clocks,))),
    "aliasing metric": ("pure", lambda: setup(grads=(ps.concern(aliasing_metric, has_aux=True),))),
    "leaked graph": ("free of leaks", lambda: setup(remembering())),
    "rate by a Python counter": ("resumable", lambda: setup(tx=counting_rate())),
    "behaviour by a Python counter": ("resumable", lambda: setup(alternating())),
    "stale rate": ("equal eager and compiled (aot_eager)", lambda: setup(tx=counting_rate())),
    "another dtype": ("stable in its form", lambda: setup(after=(wider,))),
    "another shape": ("stable in its form", lambda: setup(after=(longer,))),
    "closed-over tensor": ("compiled once", lambda: setup(closing_over())),
    "branch on a value": ("compiled once", lambda: setup(branching)),
    "a number that changes": (
        "compiled once",
        lambda: setup(
            scaled_by_number, batch={"data": batch_of(), "rate": 0.5},
            batches=[{"data": batch_of(), "rate": 0.5 / n} for n in (1, 2)],
        ),
    ),
    "ragged batches": ("compiled once", lambda: setup(batches=[batch_of(8), batch_of(7)])),
    "detached layer": ("right in its gradients", lambda: setup(detached)),
    "wrong backward": ("right in its gradients", lambda: setup(wrong_backward)),
    "gradients added twice": ("right in its gradients", lambda: setup(backward=Doubling())),
}  # fmt: skip

GOOD = {
    "plain": setup,
    "uneven": lambda: setup(batch=UNEVEN),
    "masked": lambda: setup(batch=batch_of(8, masked=3)),
    "dropout": lambda: setup(dropout=0.5),
    "batch norm": lambda: setup(norm=True),
    "many microbatches": lambda: setup(split=8, batch=batch_of(16)),
    "momentum": lambda: setup(tx=ps.sgd(0.1, momentum=0.9, nesterov=True)),
    "mean of the params": lambda: setup(
        after=(
            ps.concern(
                lambda s, m: (s, ps.map_leaves(lambda a, b: a + 0.1 * (b - a), m, s.params)),
                slot="ema",
                init=lambda p: p,
            ),
        )
    ),
}


def ask(name, found):
    """The report on one property of a set-up."""
    return ps.properties.check(
        found.step,
        found.state,
        found.batch,
        batches=found.batches,
        device=ps.devices.cpu(),
        only=[name] if name else [],
    )


def main():
    caught = 0
    for name, (wanted, make) in MUTANTS.items():
        (result,) = ask(wanted, make()).results
        caught += result.verdict == "fails"
        print(f"{'caught' if result.verdict == 'fails' else 'MISSED'}  {name}: {result.why[:150]}")
    print(f"{caught} of {len(MUTANTS)} planted faults caught")
    return 0 if caught == len(MUTANTS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
