# Every target works as the first command on a machine with Python >= 3.10, make and a package index.
# The stamps .venv/.installed and .venv/.installed-dev are renewed when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
# One more than two cores: some tests wait for time limits. Files stay whole, since their tests share reference runs.
TEST_WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
QUICKSTART_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install install-dev quickstart test zoo lint format types bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "lightning-3d needs Python 3.10 or newer; '$(PYTHON)' is missing or older. Name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and exactly as pinned: a range would let pip fetch another build of several gigabytes.
$(VENV)/.torch: $(BIN)/python constraints.txt
	$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@touch $@

$(RUN_STAMP): $(VENV)/.torch pyproject.toml
	$(PIP) install -e . -c constraints.txt
	@touch $@

$(DEV_STAMP): $(VENV)/.torch pyproject.toml
	$(PIP) install -e '.[dev]' -c constraints.txt
	@touch $(RUN_STAMP) $@

install: $(RUN_STAMP)  ## create .venv with the package
install-dev: $(DEV_STAMP)  ## the same with what tests and linters need

quickstart: $(RUN_STAMP)  ## train a small GPT at pp2 dp2 tp2 on 8 CPU processes
	$(BIN)/lightning-3d fit --config recipes/quickstart.yaml $(QUICKSTART_ARGS)

test: lint types  ## lint, types and all tests
	$(PYTEST) $(PYTEST_ARGS)

zoo: $(DEV_STAMP)  ## train every model of the zoo at every layout, and write the table of the README
	$(BIN)/python -m tests.zoo.table

test-long: $(DEV_STAMP)  ## the tests that take minutes: every pair of layouts
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lint: $(DEV_STAMP)  ## ruff
	$(BIN)/ruff check .

format: $(DEV_STAMP)  ## let ruff sort imports and format the code
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

types: $(DEV_STAMP)  ## mypy
	$(BIN)/mypy

bench: $(DEV_STAMP)  ## benchmark table against stock Lightning and hand-written parallelism
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.monitor

clean:  ## remove what builds, tests and runs left behind, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs runs
	find lightning_3d tests -name __pycache__ -type d -prune -exec rm -rf {} +
