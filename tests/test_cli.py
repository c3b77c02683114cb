"""The command and the pytest plugin, each in a process of its own, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import purestep as ps

from toys import toy_state, toy_step

RECIPES = Path(__file__).parent / "recipes"
KNOWN = {
    "mean_of_means": ("cut invariant", "return the sum of the loss"),
    "dropout_without_key": ("drawn from the key", "draw from the step's key"),
    "in_place_optimizer": ("pure", "returns a new tensor"),
    "recompiling_rate": ("compiled once", "hand in what changes as a tensor"),
    "order_dependent_resume": ("resumable", "keep it in a slot"),
}


def run(*arguments, module="purestep.cli", **environment):
    known = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    given = {**known, "COLUMNS": "300", "NO_COLOR": "1", **environment}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", KNOWN)
def test_the_known_fault_of_a_recipe_is_found_and_its_remedy_named(name):
    wanted, remedy = KNOWN[name]
    code, out, log = run("check", RECIPES / f"{name}.py", "--only", wanted, "--fix-hint")
    assert code == 1, log
    (row,) = [line for line in out.splitlines() if wanted in line and "fails" in line]
    assert remedy in " ".join(out.split())
    assert row


def test_every_recipe_of_the_known_faults_is_here():
    assert {path.stem for path in RECIPES.glob("*.py")} == set(KNOWN)


GOOD = """
import torch, purestep as ps

def loss(w, x, key):
    return ps.Loss((w * x).sum(), weight=len(x))

step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
state = ps.init(torch.tensor(0.0), step)
"""


def test_a_good_script_exits_with_zero_and_asks_everything(tmp_path):
    script = tmp_path / "good.py"
    script.write_text(GOOD + "loader = [torch.ones(4)] * 5\n")
    code, out, log = run("check", script, "--processes", "1")
    assert code == 0, out + log
    for name in ("pure", "spread invariant", "equal eager and compiled (aot_eager)", "the same in 1 more processes"):
        assert any(name in line and "holds" in line for line in out.splitlines()), name


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (GOOD, (), "it has no batch, batches or loader; name its batch with --batch"),
        ("batch = 1", (), "it has no step; name it with --step"),
        (
            GOOD + "other = step.apart()\nbatch = torch.ones(4)",
            (),
            "it has several: step, other; choose one with --step",
        ),
        (GOOD + "batch = torch.ones(4)", ("--state", "start"), "it has no variable 'start' for --state"),
        (GOOD + "loader = []", (), "its loader gives no batch"),
        (GOOD + "raise KeyError('in the script')", (), "it raises KeyError: 'in the script'"),
        (GOOD + "batch = torch.ones(4)", ("--only", "nothing"), "there is no property 'nothing'"),
    ],
)
def test_what_cannot_be_asked_exits_with_two_and_says_why(tmp_path, text, arguments, words):
    script = tmp_path / "script.py"
    script.write_text(text)
    code, out, _ = run("check", script, *arguments)
    assert code == 2
    assert words in " ".join(out.split())


def test_a_script_may_hand_over_what_is_checked(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GOOD + "other = step.apart()\ndef purestep_check():\n    return other, state, torch.ones(4)\n")
    code, out, log = run("check", script, "--only", "pure", "deterministic")
    assert code == 0, out + log


def test_two_runs_are_compared_by_their_digests(tmp_path):
    def train(name, rate, batches, every=1):
        step, path = toy_step(rate), tmp_path / name
        trace, state = ps.DigestTrace(path, digest_every=every), toy_state(step)
        for x in batches:
            state, _ = step(state, torch.full((2,), x, dtype=torch.float64))
            trace.add(state)
        return path

    one, same = train("one.jsonl", 1.0, [1.0, 2.0, 3.0, 4.0]), train("same.jsonl", 1.0, [1.0, 2.0, 3.0, 4.0])
    other, sparse = train("other.jsonl", 1.0, [1.0, 2.0, 5.0, 4.0]), train("sparse.jsonl", 1.0, [1.0, 2.0, 3.0, 4.0], 2)
    assert run("diff", one, same)[:2] == (0, "the runs agree in every call that both have\n")
    assert run("diff", one, sparse)[0] == 0
    code, out, _ = run("diff", one, other)
    assert code == 1
    assert "agree up to call 2 and differ at call 3: " in out
    assert "first state.params" in out
    code, out, _ = run("diff", one, tmp_path / "none.jsonl")
    assert code == 2
    assert "there is no trace" in out
    resumed = ps.DigestTrace(one)
    state = toy_state(toy_step())
    state, _ = toy_step()(state, torch.ones(2, dtype=torch.float64))
    resumed.add(state)  # a run that goes back to call 1 replaces what came after
    assert len(one.read_text().splitlines()) == 1
    with other.open("a") as file:
        file.write('{"call": 5, "dig')  # a crash
    assert run("diff", same, other)[0] == 1


def test_an_incomplete_last_batch_is_no_fault(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GOOD + "loader = [torch.ones(4), torch.ones(4), torch.ones(3)]")
    code, out, log = run("check", script, "--only", "compiled once", "resumable")
    assert code == 0, out + log


TESTS = """
import pytest, torch
import purestep as ps

@pytest.mark.deterministic
def test_same():
    return torch.ones(2)

@pytest.mark.deterministic
def test_drawn():
    return torch.rand(2)

@pytest.mark.deterministic
def test_nothing():
    torch.ones(2)

def loss(w, x, key):
    return ps.Loss((w * x).sum(), weight=len(x))

step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))

def test_good(purestep_check):
    report = purestep_check(step, ps.init(torch.tensor(0.0), step), torch.ones(4), only=["pure", "cut invariant"])
    assert len(report.results) == 2

def mean(w, x, key):
    return ps.Loss((w * x).mean(), weight=1)

bad = ps.compose(ps.split_batch(2), ps.forward(mean), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))

def test_bad(purestep_check):
    purestep_check(bad, ps.init(torch.tensor(0.0), bad), torch.tensor([1.0, 2.0, 4.0]), only=["cut invariant"])
"""


def test_the_plugin(tmp_path):
    (tmp_path / "test_users.py").write_text(TESTS)
    arguments = ("-p", "purestep.pytest_plugin", "--purestep-runs", "3", "-q", "-p", "no:cacheprovider", tmp_path)
    _, out, _ = run(*arguments, module="pytest", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    failed = {line.split("::")[1].split(" ")[0] for line in out.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_drawn", "test_nothing", "test_bad"}, out
    assert "run 2 gave other bits than the first: result[0]" in out
    assert "returns what is compared" in out
    assert "the step does not hold what is asked of it" in out


def test_the_plugin_does_not_import_torch():
    code = "import sys, purestep.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_and_the_command_are_declared():
    import importlib.metadata

    try:
        entries = importlib.metadata.distribution("purestep").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("purestep is not installed here")
    assert {(entry.group, entry.value) for entry in entries} == {
        ("console_scripts", "purestep.cli:main"), ("pytest11", "purestep.pytest_plugin"),
    }  # fmt: skip
