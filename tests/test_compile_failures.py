"""What cannot be compiled is said, in a process of its own: never a silent fall back, never a lost state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from purestep.core.compile_cache import is_whole_library

SCRIPT = """
import torch, purestep as ps

def loss(w, x, key):
    return ps.Loss((w * x).sum(), weight=len(x))

step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
state = ps.init(torch.zeros(()), step)
try:
    state, _ = ps.jit(step, device=ps.devices.cpu(), donate=True)(state, torch.ones(4))
    print("ran", float(state.params))
except ps.CompileError as error:
    print("refused:", error, "state:", float(state.params))
"""


def run(folder, **environment):
    known = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHINDUCTOR"))}
    given = {**known, "TORCHINDUCTOR_CACHE_DIR": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=given, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


@pytest.mark.inductor
def test_no_compiler(tmp_path):
    out, _ = run(tmp_path / "cache", PATH=str(tmp_path), CXX="")
    assert out.startswith("refused: Inductor could not compile the step")
    assert "there is no C++ compiler on the path: install one" in out
    assert out.endswith("state: 0.0")


@pytest.mark.inductor
def test_a_damaged_cache_is_said_and_then_mended(tmp_path):
    cache = tmp_path / "cache"
    assert run(cache)[0] == "ran -1.0"
    libraries = sorted(cache.glob("*/*.so"))
    assert libraries
    whole = libraries[-1].read_bytes()
    for broken in (whole[: len(whole) // 2], b"no library", b""):
        libraries[-1].write_bytes(broken)
        os.utime(libraries[-1], (0, 0))  # a file of this moment would be one that somebody is still writing
        out, _ = run(cache)
        assert out.startswith(f"refused: the compile cache is damaged: {libraries[-1]}")
        assert out.endswith("state: 0.0")
    libraries[-1].unlink()
    assert run(cache)[0] == "ran -1.0"
    for entry in (cache / "fxgraph").rglob("*"):
        if entry.is_file():
            entry.write_bytes(b"garbage")
    out, log = run(cache)
    assert out == "ran -1.0"  # compiled again
    assert "unable to load" in log or "codecache" in log  # and torch said so


def test_a_library_that_another_process_is_writing_is_waited_for(tmp_path, monkeypatch):
    import threading

    import torch

    from purestep.core import compile_cache

    whole = next(Path(torch.__file__).parent.glob("lib/libc10.so")).read_bytes()
    library = tmp_path / "ab" / "abc.so"
    library.parent.mkdir()
    library.write_bytes(whole[:5000])
    monkeypatch.setattr(compile_cache, "compile_cache_folder", lambda: tmp_path)
    writer = threading.Timer(0.3, library.write_bytes, [whole])
    writer.start()
    compile_cache.refuse_damaged()
    assert library.read_bytes() == whole
    writer.join()


def test_a_whole_library_is_told_from_a_shortened_one(tmp_path):
    import torch

    library = Path(next(Path(torch.__file__).parent.glob("lib/libc10.so")))
    assert is_whole_library(library)
    short = tmp_path / "short.so"
    content = library.read_bytes()
    short.write_bytes(content[: len(content) // 2])
    assert not is_whole_library(short)
    assert is_whole_library(tmp_path / "gone.so")
