"""Every example runs: the README's blocks as they stand, and the digits to the accuracy that they promise."""

import importlib.util
import re
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 (it sets variables of the environment when first imported: here, not in a test)
import torch

import purestep as ps

ROOT = Path(ps.__file__).parent


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


BLOCKS = blocks(ROOT / "README.md")
PAGES = [(path.name, block) for path in sorted((ROOT / "docs").glob("*.md")) for block in blocks(path)]


def digits():
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.inductor
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_readme(index, capsys):
    if "trace_autograd_ops" in BLOCKS[index]:
        import torch._dynamo as dynamo

        if not hasattr(dynamo.config, "trace_autograd_ops"):
            pytest.skip("this torch cannot trace autograd.grad")
        with dynamo.config.patch(trace_autograd_ops=True):
            exec(compile(BLOCKS[index], f"README block {index}", "exec"), {})
    else:
        exec(compile(BLOCKS[index], f"README block {index}", "exec"), {})
        assert capsys.readouterr().out


@pytest.mark.parametrize(("name", "block"), PAGES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(PAGES)])
def test_documentation(name, block):
    exec(compile(block, name, "exec"), {})


def test_the_readme_opens_with_a_script_that_trains():
    assert "for batch in loader:" in BLOCKS[0]
    assert len(BLOCKS) >= 4


@pytest.mark.inductor
def test_digits_reach_their_accuracy_with_one_compile(tmp_path):
    result = digits().main(["--out", str(tmp_path / "digits.png")])
    assert result.test_accuracy >= 0.97
    assert result.compiles == 1
    assert result.picture.read_bytes().startswith(b"\x89PNG")


def test_digits_give_the_same_numbers_eager_and_traced(tmp_path):
    results = [
        digits().main(["--epochs", "1", "--backend", backend, "--out", str(tmp_path / "digits.png")])
        for backend in ("eager", "aot_eager")
    ]
    assert results[0][:3] == results[1][:3]
    assert torch.is_grad_enabled()
