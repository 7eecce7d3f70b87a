# make demo    train two small models on 4 CPU processes, see the bubble and a timeline
# make test    every test; JOBS=4 runs four at a time
# make check   formatting, lint, types, import rule, doctests
#
# Each makes its own .venv on a fresh machine; nothing has to be installed first but Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format clean

demo: $(STAMP)
	$(BIN)/python -m lightning_parallel.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q $(if $(JOBS),-n $(JOBS) --dist worksteal)

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

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache demo_output
