# make demo    from nothing to generated text and trained predictors: environment, install, generate,
#              train, generate; it says beforehand what it takes
# make test    environment, install, lint, types, all tests but the next
# make test-engines    those against real engines: clients, a Slurm cluster, Ray, S3 servers, Prometheus, systemd
#              and the linters of the service files. As root it installs Debian's packages. Some 20 minutes
# make check   lint, types and the quick tests, in the environment that is there
# make fuzz    runs the C modules under AddressSanitizer and UBSan (GCC), installs atheris (CPython 3.11
#              to 3.13 on Linux) and fuzzes what parses files, requests and options, SECONDS=60 each:
#              about 20 minutes; TARGET=zoo-index fuzzes one
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

.PHONY: demo test test-engines check fuzz docs clean

PROMPT := prompt="The heart pumps blood"
DEMO := runs/demo

demo:
	@echo "make demo: install, generate, train a small predictor, generate with it. No GPU, no account."
	@echo "  download  0.5 GB with torch for the CPU, several GB with torch for CUDA, the default on Linux:"
	@echo "            make demo PIP_ARGS=\"--extra-index-url https://download.pytorch.org/whl/cpu\""
	@echo "  disk      2 GB in $(VENV) (with CUDA 8 GB), 0.6 GB in runs/; make clean removes both"
	@echo "  time      the download, then about three minutes on two cores"
	@echo
	@echo "1. Install into $(VENV)"
	@$(MAKE) --no-print-directory --silent $(VENV)/installed
	@echo
	@echo "2. Generate, with a quarter of the experts in memory and predictors that ship with moecast"
	$(BIN)/moecast generate budget=25% $(PROMPT)
	@echo
	@echo "   The same without forecasts and with plain LRU eviction: the same text, more time per token (TPOT)"
	$(BIN)/moecast generate budget=25% system=on-demand $(PROMPT) > /dev/null
	@echo
	@echo "3. Train on 64 prompts (512 without data.num_prompts), score on held-out ones"
	$(BIN)/moecast train data.num_prompts=64 data.max_new_tokens=16 max_epochs=3 replay_tokens=50 score_shifted=false run_dir=$(DEMO)
	@echo
	@echo "4. Generate with what was just trained"
	$(BIN)/moecast generate budget=25% predictor=$(DEMO)/entries/residual system.reuse_predictor=$(DEMO)/entries/reuse $(PROMPT)
	@echo
	@echo "Next:"
	@echo "  $(BIN)/moecast serve budget=50%    an OpenAI-compatible server and its status page: http://localhost:8000"
	@echo "  $(BIN)/python -m webbrowser $(CURDIR)/$(DEMO)/report/report.html    figures of this training"
	@echo "  $(BIN)/moecast serve Qwen/Qwen3-30B-A3B model.local_only=false budget=50%    a real model: downloads 61 GB"

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
	@echo "The policy core and the simulator once more, uncompiled"
	MOECAST_COMPILED=0 $(BIN)/python -m pytest -m "$(MARKS)" tests/unit/runtime/policy tests/unit/runtime/sim -n $(WORKERS)

SECONDS ?= 60
TARGET ?= $(notdir $(wildcard tests/fuzz/corpus/*))

fuzz: $(VENV)/installed-dev
	@echo "make fuzz: $(words $(TARGET)) targets of $(SECONDS) s each; a fault ends it and names the input's file"
	$(INSTALL) -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz.sanitised
	@for target in $(TARGET); do \
		echo "fuzzing $$target"; $(BIN)/python -m tests.fuzz $$target $(SECONDS) || exit 1; \
	done

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
