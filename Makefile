# make demo    from nothing to a table and generated text: environment, install, train, serve
# make test    environment, install, lint, types, all tests but the next
# make test-engines    those that start Ray and Slurm's local executor: ten minutes or more
# make check   lint, types and the quick tests, in the environment that is there
# make docs    builds the documentation into site/
# make clean   removes what the others made
#
# PYTHON=python3.12        another interpreter
# WORKERS=4                tests side by side; each may take 2 GiB of memory
# VENV=/tmp/env            another place for the environment
# PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"   torch without CUDA on Linux

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo test test-engines check docs clean

demo: $(VENV)/installed
	$(BIN)/python -m train predictor=stride run_dir=runs/demo
	$(BIN)/python -m runtime generate predictor=runs/demo/entries/stride budget=50% prompt="The heart pumps blood"

test: $(VENV)/installed-dev
	$(MAKE) check MARKS="not engines"

test-engines: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m engines

WORKERS ?= 2
MARKS ?= not slow and not gpu and not faults and not engines

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "$(MARKS)" -n $(WORKERS) --dist worksteal

docs: $(VENV)/installed-dev
	$(BIN)/python -m tests.docs.generate
	$(BIN)/zensical build --strict --clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache runs traces
