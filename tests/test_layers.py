"""The layers import as designed, private torch stays in one module, and importing is quick."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import purestep as ps

ROOT = Path(ps.__file__).parent
ARROWS = {"state": set(), "steps": {"state"}, "devices": {"state"}, "core": {"state", "steps"}}
FILES = [path for folder in ARROWS for path in sorted((ROOT / folder).rglob("*.py"))]
PRIVATE = ("torch._", "torch.fx.experimental", "torch.utils._python_dispatch")


def imports(path):
    """Pairs (level, module) of every import in a file, also inside functions and type-checking blocks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, name.name) for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_layer_imports_only_the_layers_below(path):
    parts = path.relative_to(ROOT).parts
    for level, module in imports(path):
        assert not module.startswith("purestep"), "inside the package imports are relative"
        if level == len(parts):
            assert module.split(".")[0] in ARROWS[parts[0]], f"{parts[0]} must not import {module}"
        assert level <= len(parts)


def test_no_file_imports_in_a_circle():
    edges = {}
    for path in FILES:
        package = path.relative_to(ROOT).parts[:-1]
        edges[".".join((*package, path.stem))] = {
            ".".join((*package[: len(package) + 1 - level], module)) for level, module in imports(path) if level
        }
    seen, done = [], set()

    def visit(name):
        assert name not in seen, f"circle: {' -> '.join([*seen, name])}"
        if name in done or name not in edges:
            return
        seen.append(name)
        for other in sorted(edges[name]):
            visit(other)
        done.add(seen.pop())

    # compose and checks meet under TYPE_CHECKING only, which runs nothing
    edges["core.checks"].discard("core.compose")
    for name in edges:
        visit(name)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_private_torch_is_touched_in_one_module_only(path):
    if path.name == "torch_private.py":
        return
    for _, module in imports(path):
        assert not module.startswith(PRIVATE), f"{path.name} imports {module}"
    private = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]  # fmt: skip
    assert not private


@pytest.mark.parametrize("folder", ["tests", "examples", "benches"])
def test_what_stands_beside_the_package_uses_public_names(folder):
    """Examples and benches; tests may look into a module that they test."""
    for path in (ROOT / folder).glob("*.py") if folder != "tests" else ():
        for level, module in imports(path):
            assert level == 0
            assert not module.startswith("purestep."), f"{path.name} imports {module}"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, purestep; print('torch' in sys.modules); purestep.init; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["False", "True"]


def test_composing_does_not_import_a_compiler():
    code = "import sys, purestep as ps; ps.jit; print([m for m in sys.modules if m.startswith('torch._inductor')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert out == "[]"


def test_public_names_exist_and_are_documented():
    for name in ps.__all__:
        assert getattr(ps, name).__doc__, name
    assert set(dir(ps)) >= set(ps.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ps.nothing  # noqa: B018 (reading it is the test)


def _raises_without_saying(function):
    doc = ast.get_docstring(function) or ""
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function))
    return raises and "Raises:" not in doc


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_public_functions_say_what_they_raise(path):
    tree = ast.parse(path.read_text())
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    assert not [f.name for f in public if _raises_without_saying(f)]
