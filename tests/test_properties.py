"""The promises of the step over generated set-ups: purity, repeatability, spec, backends and donation, bitwise."""

import os

import torch
from hypothesis import given

import purestep as ps
from purestep.state.spec import difference

from strategies import setups
from toys import differing, snapshot

CPU = ps.devices.cpu()


@given(setups())
def test_purity_repeatability_and_spec(setup):
    step, state, batch = setup
    before, environment = (snapshot(state), snapshot(batch)), dict(os.environ)
    numbers = torch.random.get_rng_state()
    one = step(state, batch)
    torch.manual_seed(1)
    other = step(state, batch)
    torch.random.set_rng_state(numbers)
    assert differing(before, (snapshot(state), snapshot(batch))) == []
    assert dict(os.environ) == environment
    assert differing(one, other) == []
    assert difference(state, one[0]) is None


@given(setups())
def test_backends_and_donation_give_the_same_bits(setup):
    step, state, batch = setup
    expected = step(*step(state, batch)[:1], batch)
    for backend in ("eager", "aot_eager"):
        for donate in (False, True):
            fast = ps.jit(step, device=CPU, backend=backend, donate=donate)
            first, _ = fast(ps.copy_state(state), batch)
            assert differing(expected, fast(first, batch)) == []
            assert fast.compiles == 1


@given(setups())
def test_counters_are_one_clock(setup):
    step, state, batch = setup
    for calls in (1, 2, 3):
        state, metrics = step(state, batch)
        clock = state.counters
        assert int(clock.updates) + int(clock.skips) == int(clock.batches) == calls
        assert int(clock.updates) == int(state.opt_state.count) == int(state.window.count)
        assert int(clock.samples) == calls * len(batch[1])
        assert bool(metrics["updated"]) == bool(metrics["weight"] > 0)
