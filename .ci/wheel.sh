#!/usr/bin/env bash
# Test what is shipped: build the wheel, install it in a clean environment outside of the checkout, run its doctests.
set -euo pipefail
python=$(realpath "$1" --no-symlinks)
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --wheel --no-isolation --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" torch==2.13.0 pytest hypothesis rich tyro "$work"/dist/*.whl
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.resources
import purestep as ps

assert importlib.resources.files("purestep").joinpath("py.typed").is_file()
missing = [name for name in ps.__all__ if not hasattr(ps, name)]
assert not missing, missing
print("purestep", ps.__version__, "from", ps.__path__[0])
PY
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider --import-mode=importlib --doctest-modules --pyargs \
  purestep.state purestep.steps purestep.devices purestep.core
