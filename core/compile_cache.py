"""The compile cache on disk: a damaged library in it is named before it is loaded.

A dynamic loader that maps a shortened library ends the whole process, without an error that Python could catch.
"""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path

from ..state.errors import CompileError
from ..state.torch_private import compile_cache_folder

__all__ = ["is_whole_library", "refuse_damaged"]

_HEADER = 64  # bytes of a 64-bit ELF header


def refuse_damaged() -> None:
    """Look at every library in the compile cache.

    Raises:
        CompileError: naming the damaged files and how to get rid of them.
    """
    if not sys.platform.startswith("linux"):
        return
    folder = compile_cache_folder()
    damaged = [str(path) for path in sorted(folder.glob("*/*.so")) if not _becomes_whole(path)]
    if damaged:
        raise CompileError(
            f"the compile cache is damaged: {', '.join(damaged)} is no whole library. Remove the file, or the folder "
            f"{folder}; what it held is compiled again. Nothing was run"
        )


_SETTLED = 5.0  # seconds without a change after which nobody is writing a file any more


def _becomes_whole(path: Path) -> bool:
    """Whether a library is whole, or will be: another process may be linking it into the shared cache right now."""
    while not is_whole_library(path):
        try:
            if abs(time.time() - path.stat().st_mtime) > _SETTLED:
                return False
        except OSError:
            return True
        time.sleep(0.05)
    return True


def is_whole_library(path: Path) -> bool:
    """Whether a file has an ELF header and is as long as the header says."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
        size = path.stat().st_size
    except OSError:
        return True  # gone again, or not ours to read: the loader will say
    if len(header) < _HEADER or header[:4] != b"\x7fELF":
        return False
    order = "<" if header[5] == 1 else ">"
    (sections,) = struct.unpack_from(order + "Q", header, 40)
    entry, count = struct.unpack_from(order + "HH", header, 58)
    return bool(sections + entry * count <= size)
