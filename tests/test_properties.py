"""The promises of the step over generated set-ups, asked with the kit: bitwise, in every backend, donated or not."""

import pytest
from hypothesis import given

import purestep as ps

from strategies import setups
from toys import differing

CPU = ps.devices.cpu()
properties = ps.properties

CHEAP = [
    properties.assert_pure,
    properties.assert_key_used,
    properties.assert_deterministic,
    properties.assert_spec_stable,
]


@pytest.mark.parametrize("question", CHEAP, ids=lambda fn: fn.__name__)
@given(setups())
def test_every_set_up_holds(question, setup):
    question(*setup)


@given(setups(), setups())
def test_a_run_may_be_cut_anywhere(one, other):
    step, state, batch = one
    properties.assert_resumable(
        step, state, [batch, other[2][:2] if other[2][0].dtype == batch[0].dtype else batch, batch]
    )


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
