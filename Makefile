# make demo    from nothing to generated text, trained predictors and what they gain; it says
#              beforehand what it takes
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
ENLARGED := $(DEMO)/enlarged

demo:
	@echo "make demo: install, generate, train small predictors, see what they gain. No GPU, no account."
	@echo "  download  0.5 GB with torch for the CPU, several GB with torch for CUDA, the default on Linux:"
	@echo "            make demo PIP_ARGS=\"--extra-index-url https://download.pytorch.org/whl/cpu\""
	@echo "  disk      2 GB in $(VENV) (with CUDA 8 GB), 2.5 GB in runs/; make clean removes both"
	@echo "  time      the download, then three to four minutes on two cores"
	@echo
	@echo "1. Install into $(VENV): compiles for a minute"
	@$(MAKE) --no-print-directory --silent $(VENV)/installed
	@echo
	@echo "2. Generate, with a quarter of the experts in memory"
	$(BIN)/moecast generate budget=25% $(PROMPT) max_new_tokens=32
	@echo
	@echo "3. Train on 64 short prompts, score on held-out ones"
	$(BIN)/moecast train data.num_prompts=64 data.max_prompt_tokens=64 data.max_new_tokens=16 max_epochs=2 replay_tokens=50 score_shifted=false figures=false run_dir=$(DEMO)
	@echo
	@echo "4. What that gains, with experts of 2.9 MiB, as a 30B model has in four bits, read from this disk"
	test -e $(ENLARGED)/config.json || $(BIN)/moecast inflate total_size=2GiB output=$(ENLARGED)
	$(BIN)/moecast generate $(ENLARGED) budget=25% system=on-demand $(PROMPT) max_new_tokens=32 run_dir=$(DEMO)/on-demand
	$(BIN)/moecast generate $(ENLARGED) budget=25% predictor=$(DEMO) $(PROMPT) max_new_tokens=32 run_dir=$(DEMO)/moecast
	@$(BIN)/python -c "import json; \
	on_demand, own = (json.load(open(f'$(DEMO)/{name}/results.json'))['stats']['tpot_seconds'] for name in ('on-demand', 'moecast')); \
	print(f'The same text. A token took {1000 * on_demand:.0f} ms on demand and {1000 * own:.0f} ms with what was just trained: {on_demand / own:.1f} times as fast')"
	@echo
	@echo "Next:"
	@echo "  $(BIN)/moecast serve budget=50%    an OpenAI-compatible server and its status page: http://localhost:8000"
	@echo "  docs/laptop.md    a model of 30 billion parameters on 16 GB: what to download, and how fast it is"

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
