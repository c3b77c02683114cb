"""The loss window against a deque, and what a pure record promises beyond."""

import math
from collections import deque

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import purestep as ps
from purestep.state.spec import difference
from purestep.state.torch_private import fake_mode, fake_of, trace

from .strategies import finite
from .toys import differing, snapshot

READS = ("mean", "last", "min", "max")
VALUES = st.lists(finite, max_size=25)


def window_of(values, length, dtype=torch.float64):
    window = ps.RunningWindow.empty(length, dtype=dtype)
    for value in values:
        window = window.append(torch.tensor(value, dtype=dtype))
    return window


def read(window):
    return {name: float(getattr(window, name)()) for name in READS}


def plain(values, length):
    kept = deque(values, maxlen=length)
    if not kept:
        return dict.fromkeys(READS, math.nan)
    return {"mean": math.fsum(kept) / len(kept), "last": kept[-1], "min": min(kept), "max": max(kept)}


@given(VALUES, st.integers(1, 9))
def test_a_window_reads_as_a_deque_does_after_every_append(values, length):
    window = ps.RunningWindow.empty(length, dtype=torch.float64)
    for n, value in enumerate(values, 1):
        window = window.append(torch.tensor(value, dtype=torch.float64))
        found, wanted = read(window), plain(values[:n], length)
        assert found.pop("mean") == pytest.approx(wanted.pop("mean"), rel=1e-14, abs=1e-14)
        assert found == wanted
        assert (int(window.count), window.length) == (n, length)


@pytest.mark.parametrize("present", [1, 3, 19, 20, 21, 45])
def test_case_49_the_mean_is_over_the_values_present(present):
    assert read(window_of([4.0] * present, 20, torch.float32)) == dict.fromkeys(READS, 4.0)


def test_the_oldest_value_is_the_one_that_goes():
    window = window_of([100.0, 1.0, 2.0, -50.0, 3.0], 3)
    assert read(window) == {"mean": -15.0, "last": 3.0, "min": -50.0, "max": 3.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_window_without_values_reads_nan(dtype):
    for window in (ps.RunningWindow.empty(3, dtype=dtype), window_of([1.0, 2.0], 3, dtype).reset()):
        assert all(math.isnan(value) for value in read(window).values())


@given(VALUES, VALUES, st.integers(1, 9))
def test_reset_forgets_everything(before, after, length):
    window = window_of(before, length).reset()
    assert differing(window, ps.RunningWindow.empty(length, dtype=torch.float64)) == []
    for value in after:
        window = window.append(torch.tensor(value, dtype=torch.float64))
    assert differing(window, window_of(after, length)) == []


@given(VALUES, st.integers(1, 9))
def test_no_method_changes_the_window_or_the_value(values, length):
    window, value = window_of(values, length), torch.tensor(5.0, dtype=torch.float64)
    before = snapshot({"window": window, "value": value})
    window.append(value)
    window.reset()
    read(window)
    assert differing(before, snapshot({"window": window, "value": value})) == []


def test_a_kept_value_does_not_follow_the_tensor_it_came_from():
    value = torch.tensor(1.0)
    window = ps.RunningWindow.empty(2).append(value)
    value.fill_(9.0)
    assert float(window.last()) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given_as", [torch.int64, torch.float16, torch.float32, torch.float64])
def test_appending_keeps_shapes_and_dtypes(dtype, given_as):
    window = ps.RunningWindow.empty(4, dtype=dtype)
    after = window.append(torch.tensor(3, dtype=given_as))
    assert difference(window, after) is None
    assert difference(window, after.reset()) is None
    assert {getattr(after, name)().shape for name in READS} == {torch.Size([])}
    assert read(after) == dict.fromkeys(READS, 3.0)


def test_a_number_that_is_not_finite_is_seen_while_it_is_in_the_window_and_no_longer():
    window = window_of([math.inf, 1.0], 2)
    assert (float(window.mean()), float(window.max()), float(window.last())) == (math.inf, math.inf, 1.0)
    window = window_of([math.nan, 1.0], 2)
    assert all(math.isnan(float(getattr(window, name)())) for name in ("mean", "min", "max"))
    assert read(window_of([math.inf, math.nan, 1.0, 2.0], 2)) == {"mean": 1.5, "last": 2.0, "min": 1.0, "max": 2.0}


def test_the_window_holds_no_graph_of_the_loss():
    loss = torch.tensor(2.0, requires_grad=True) * 3.0
    window = ps.RunningWindow.empty(2).append(loss)
    assert not window.values.requires_grad
    assert float(window.last()) == 6.0


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_is_refused_by_name(length):
    with pytest.raises(ValueError, match=f"length must be at least 1, got {length}"):
        ps.RunningWindow.empty(length)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_dtype_that_cannot_hold_a_loss_is_refused(dtype):
    with pytest.raises((ValueError, TypeError), match="dtype"):
        ps.RunningWindow.empty(3, dtype=dtype)


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 1), torch.ones(1)], ids=["3", "2x1", "1"]
)
def test_a_value_that_is_not_0d_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        ps.RunningWindow.empty(3).append(value)


def flat(values, count, value):
    """Append and read, from tensors to tensors, as a step would."""
    after = ps.RunningWindow(values, count).append(value)
    return [after.values, after.count, *(getattr(after, name)() for name in READS), after.reset().values]


def test_one_trace_serves_every_position():
    window, value, mode = ps.RunningWindow.empty(3), torch.tensor(1.0), fake_mode()
    graph = trace(flat, mode, [fake_of(mode, t) for t in (window.values, window.count, value)])
    for value in (2.0, -1.0, 7.5, 0.25, 3.0):
        got = graph(window.values, window.count, torch.tensor(value))
        assert differing(got, flat(window.values, window.count, torch.tensor(value))) == []
        window = ps.RunningWindow(got[0], got[1])
    assert differing(window, window_of([2.0, -1.0, 7.5, 0.25, 3.0], 3, torch.float32)) == []
