# make demo    train two small models on 4 CPU processes, see the bubble and a timeline
# make test    the tests (minutes), two at a time; JOBS=1 one by one, JOBS=8 on a large machine
# make test-slow     those that are left out of it: two hosts, large models, more configurations
# make test-vision   models of torchvision and timm, which it puts into a folder beside the environment
# make test-all      everything, a hundred thousand random interleavings of servers too (hours)
# make test-lowest   `make test` with the lowest versions that we support, in an environment of their own (PyPI has torch
#                    2.9.0 as a CUDA build only: 8 GB on disk, but it runs on CPUs); .ci/lowest is a job of it
# make mutants put 200 faults into the package, one at a time, and list those that no test sees; SEED=1 draws others
# make check   formatting, lint, types, import rule, doctests
#
# Each makes its own .venv on a fresh machine; nothing has to be installed first but Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
SEED ?= 0
NUMBER ?= 200
STAMP := $(VENV)/.installed

LOWEST := .venv-lowest/bin

.PHONY: demo test test-slow test-vision test-all test-lowest mutants check format clean

demo: $(STAMP)
	$(BIN)/python -m lightning_parallel.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow and not hours"

test-vision: $(VENV)/vision/.installed
	PYTHONPATH=$(VENV)/vision $(BIN)/python -m pytest -q tests/trainer/test_vision_models.py

test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile=others

test-lowest: .venv-lowest/.installed
	$(LOWEST)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --seed $(SEED) --number $(NUMBER) --jobs $(JOBS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py
	$(BIN)/python -m pytest -q --doctest-modules lightning_parallel

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch is asked for by its version first, so that no other requirement picks another one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(VENV)/vision/.installed: $(STAMP) Makefile
	rm -rf $(VENV)/vision
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/vision torchvision==0.28.0 timm==1.0.31
	touch $@

.venv-lowest/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/python || $(PYTHON) -m venv .venv-lowest
	$(LOWEST)/python -m pip install -q -c constraints-lowest.txt torch
	$(LOWEST)/python -m pip install -q -c constraints-lowest.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache demo_output
