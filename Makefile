# `make demo` and `make test` need a Debian machine with git, make and python3-venv, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := install
.PHONY: install system demo test simulate check format-check lint types imports tidy format clean

install: system $(STAMP)

# Once; again when the dependencies change.
$(STAMP): pyproject.toml constraints.txt
	@tools/install.sh environment $(PYTHON) $(VENV)
	@touch $@

# Quick when nothing is missing, so that it may run each time.
system:
	@tools/install.sh system $(PYTHON)

demo: install
	$(BIN)/epd demo

test: install
	$(BIN)/python -m pytest

# Another seed each time, printed; the fixed ones are in the tests.
simulate: install
	$(BIN)/epd simulate --hours 4

check: format-check lint types imports tidy

format-check: $(STAMP)
	$(BIN)/ruff format --check

lint: $(STAMP)
	$(BIN)/ruff check

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

tidy: $(STAMP)
	$(BIN)/python tools/tidy.py
	$(BIN)/python tools/state_diagram.py --check

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
