# make demo    train two small models on 4 CPU processes, see the bubble and a timeline
# make test    the tests (minutes), two at a time; JOBS=1 one by one, JOBS=8 on a large machine
# make test-slow     those that are left out of it: two hosts, large models, more configurations
# make test-vision   models of torchvision and timm, which it puts into a folder beside the environment
# make test-lightning LIGHTNING_SOURCE=folder   Lightning's own tests over our strategies; the folder is a checkout of
#                    Lightning 2.6.5. STRATEGIES="zero_2 hybrid" runs those only (15 minutes or more each)
# make test-notebooks   every notebook whole; `make test` runs their first cells and imports, and one of them
# make test-all      everything, a hundred thousand random interleavings of servers too (hours)
# make test-gpu      what only GPUs can show, on as many as there are; it says what it left out and why
# make test-versions VERSIONS="lowest 2.11 newest"   `make test` with other versions of torch (and of Lightning:
#                    "2.11+2.6.1"), each in an environment of its own that is removed after it (up to 8 GB on disk)
# make mutants put 200 faults into the package, one at a time, and list those that no test sees; SEED=1 draws others
# make check   formatting, lint, types, import rule
#
# Each makes its own .venv on a fresh machine; nothing has to be installed first but Python >= 3.11. With
# VENV=/path/to/env the interpreter there runs instead and nothing is installed: what it lacks is skipped by name (it needs
# torch, lightning, pytest, pytest-timeout, pytest-xdist and hypothesis).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# An environment of somebody else's is used as it is.
STAMP := $(if $(filter .venv,$(VENV)),$(VENV)/.installed)
VERSIONS ?= lowest 2.11 newest
STRATEGIES ?= pipeline zero_2 hybrid parameter_server
SEED ?= 0
NUMBER ?= 200

.PHONY: demo test test-slow test-vision test-notebooks test-lightning test-all test-gpu test-versions mutants check format clean

demo: $(STAMP)
	$(BIN)/python -m lightning_parallel.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow and not hours"

test-vision: $(VENV)/vision/.installed
	PYTHONPATH=$(VENV)/vision $(BIN)/python -m pytest -q tests/trainer/test_vision_models.py

test-lightning: build/lightning_suite/site/.installed
	PYTHONPATH=build/lightning_suite/site $(BIN)/python -m tests.lightning_suite.run --source "$(LIGHTNING_SOURCE)" \
		--strategies $(STRATEGIES) --workers $(JOBS)

test-notebooks: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow or not slow" tests/notebooks

test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile=others

test-gpu: $(STAMP)
	TEST_GPUS=1 $(BIN)/python -m pytest -q -p no:xdist tests/gpu tests/unit/parameter_server/test_staging.py

test-versions:
	$(PYTHON) tests/versions.py $(VERSIONS) --jobs $(JOBS)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --seed $(SEED) --number $(NUMBER) --jobs $(JOBS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch is asked for by its version first, so that no other requirement picks another one.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/vision/.installed: $(STAMP) Makefile
	rm -rf $(VENV)/vision
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/vision torchvision==0.28.0 timm==1.0.31
	touch $@

# What Lightning's tests import and we do not. Results lie beside it, so that a second run goes on where one was stopped.
build/lightning_suite/site/.installed: $(STAMP) Makefile
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --target $(@D) pytest-rerunfailures==16.7 cloudpickle==3.1.2 \
		omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.8
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache demo_output
