# Everything sets itself up: only Python, make and a C++ compiler are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/purestep
STAMP := $(VENV)/.installed

export TORCHINDUCTOR_CACHE_DIR ?= $(CACHE)/inductor

PEERS := $(CACHE)/peers-$(shell cat benches/requirements.txt constraints.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: bench demo test deep mutants lint types wheel clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip==25.3
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 setuptools wheel build
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test,lint]"
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/digits.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests
	$(BIN)/python -m pytest --doctest-modules --doctest-continue-on-failure state steps devices core

bench: $(PEERS)/.installed
	PYTHONPATH=benches $(PEERS)/bin/python benches/run.py $(WORKLOADS)

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip==25.3
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 setuptools wheel
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement benches/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[bench]"
	touch $@

mutants: $(STAMP)
	PYTHONPATH=tests $(BIN)/python tests/mutants.py

deep: $(STAMP)
	PURESTEP_PROFILE=deep $(BIN)/python -m pytest -n 2 --dist worksteal tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

wheel: $(STAMP)
	bash .ci/wheel.sh $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
