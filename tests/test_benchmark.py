"""Benchmarks: what is measured is what was asked, and a measurement that cannot be trusted says so."""

import json
import os
import time

import pytest
import torch

import purestep as ps
from purestep.core.benchmark.measure import in_turns
from purestep.core.benchmark.memory import peak_bytes
from purestep.core.benchmark.overhead import Emptied
from purestep.core.benchmark.shares import shares
from purestep.core.benchmark.start import first_steps

from test_cli import run
from toys import differing, mlp, mlp_step, rows_of, snapshot, toy_state, toy_step

CPU = ps.devices.cpu()
QUICK = {"rounds": 3, "seconds": 0.002, "start": False}


def eager_toy():
    step = toy_step()
    return ps.jit(step, device=CPU, backend="eager", donate=True), toy_state(step), torch.ones(2, dtype=torch.float64)


def test_a_ratio_is_that_of_the_medians_to_the_first_of_the_others():
    sleeps = {"two": lambda: time.sleep(0.002), "six": lambda: time.sleep(0.006)}
    report = ps.benchmark(*eager_toy(), against=sleeps, rounds=3, seconds=0.02, start=False)
    ours, two, six = report.rows
    assert [row.name for row in report.rows] == ["purestep", "two", "six"]
    assert two.ratio == 1.0
    assert 2.0 < six.ratio < 4.0
    assert 0.002 <= two.median < 0.005
    assert ours.ratio == pytest.approx(ours.median / two.median)


def test_contestants_take_turns():
    order = []
    calls = {name: lambda name=name: (time.sleep(0.002), order.append(name)) for name in ("a", "b")}
    in_turns(calls, rounds=4, seconds=0.01)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * (len(turns) // 2)
    assert len(turns) >= 8


def test_a_noisy_measurement_says_so():
    waits = iter([0.001, 0.02] * 100)

    def restless():
        time.sleep(next(waits))

    report = ps.benchmark(*eager_toy(), against={"restless": restless}, rounds=8, seconds=0.001, start=False)
    assert report.rows[1].noisy
    assert report.noisy
    assert "measure again" in str(report)
    steady = in_turns({"steady": lambda: time.sleep(0.03)}, rounds=3, seconds=0.05)["steady"]
    assert steady.meets_confidence()


def test_peak_memory_is_what_is_held_at_a_time():
    def call():
        one = torch.zeros(1 << 18)
        del one
        two, three = torch.zeros(1 << 18), torch.zeros(1 << 17)
        return two.sum() + three.sum()

    assert (3 << 19) <= peak_bytes(call) < (3 << 19) + 4096


def test_the_state_that_is_given_stays_and_the_steps_own_compiles_are_not_counted():
    fast, state, batch = eager_toy()
    before = snapshot(state)
    report = ps.benchmark(fast, state, batch, **QUICK)
    assert differing(before, snapshot(state)) == []
    assert report.compiles == 1
    assert fast.compiles == 0


def test_shares_name_the_concerns_and_add_up():
    def slow(grads):
        time.sleep(0.3)  # far beyond what a busy machine adds to any other concern
        return grads

    model = mlp()
    step = ps.compose(
        ps.split_batch(2), ps.forward(lambda m, b, key: ps.Loss(m(b[0]).sum(), len(b[0])), model), ps.backward(),
        ps.accumulate(), slow, ps.clip(max_norm=1.0), ps.step(ps.sgd(0.1)),
    )  # fmt: skip
    found = shares(step, ps.init(model, step), rows_of(4), repeats=2)
    assert set(found) == {"forward", "backward", "accumulate", "slow", "clip", "step", "the rest"}
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(found, key=found.get) == "slow"


def test_a_traced_graph_holds_no_scopes():
    step = mlp_step(mlp())
    fast = ps.jit(step, device=CPU, backend="aot_eager")
    fast(ps.init(mlp(), step), rows_of(4))
    (program,) = fast._programs.values()
    graph = program.call.__closure__[0].cell_contents.fn
    assert not any("record_function" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.inductor
def test_the_call_without_arithmetic_computes_nothing_and_hands_out_all_metrics():
    step = mlp_step(mlp())
    state = ps.init(mlp(), step)
    values = snapshot(state)
    emptied = Emptied(step, CPU, donate=True, backend="inductor")
    after, metrics = emptied(state, rows_of(4))
    assert differing(values, snapshot(after)) == []
    assert {"loss", "grad_norm", "accuracy"} <= set(metrics)
    assert float(metrics["loss"]) == 0.0


@pytest.mark.inductor
def test_the_first_step_is_timed_cold_and_warm_and_the_cache_is_left_alone():
    step = mlp_step(mlp())
    fast = ps.jit(step, device=CPU, donate=True)
    before = dict(os.environ)
    cold, warm = first_steps(fast, ps.init(mlp(), step), rows_of(4))
    assert cold > warm > 0
    assert dict(os.environ) == before


def test_the_report_as_text_json_and_picture(tmp_path):
    report = ps.benchmark(*eager_toy(), **QUICK)
    text = str(report)
    assert all(word in text for word in ("purestep", "the step run eagerly", "ratio", "peak memory", "forward"))
    report.save(tmp_path / "bench.json")
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["rows"][0]["median"] == report.rows[0].median
    assert len(saved["rows"][0]["times"]) == 3
    report.draw(tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"against": {}}, TypeError, "against"),
        ({"against": {"me": 3}}, TypeError, r"against\['me'\]"),
        ({"against": {"purestep": print}}, TypeError, "another name"),
        ({"rounds": 2}, ValueError, "rounds"),
        ({"seconds": 0.0}, ValueError, "seconds"),
    ],
)
def test_bad_arguments_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        ps.benchmark(*eager_toy(), **{**QUICK, **changes})


def test_a_step_that_is_not_compiled_needs_a_device():
    fast, state, batch = eager_toy()
    with pytest.raises(ValueError, match="device is missing"):
        ps.benchmark(fast.step, state, batch, **QUICK)
    with pytest.raises(TypeError, match=r"ps\.compose"):
        ps.benchmark(print, state, batch, **QUICK)


SCRIPT = """
import time
import torch, purestep as ps

def loss(w, x, key):
    return ps.Loss((w * x).sum(), weight=len(x))

step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
state = ps.init(torch.tensor(0.0), step)
batch = torch.ones(3)

def purestep_against():
    return {"a nap": lambda: time.sleep(0.001)}
"""


def test_the_command_measures_a_script(tmp_path):
    script, figures, picture = tmp_path / "train.py", tmp_path / "out.json", tmp_path / "out.png"
    script.write_text(SCRIPT)
    options = ("--backend", "aot_eager", "--no-start", "--rounds", 3, "--seconds", 0.002)
    code, out, log = run("bench", script, *options, "--json", figures, "--picture", picture)
    assert code == 0, log
    assert "a nap" in out
    assert [row["name"] for row in json.loads(figures.read_text())["rows"]] == ["purestep", "a nap"]
    assert picture.exists()


def test_the_command_says_what_it_did_not_find(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("x = 1\n")
    code, out, _ = run("bench", script)
    assert code == 2
    assert "no step" in out
