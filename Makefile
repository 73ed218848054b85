# make chat   sets everything up and opens a chat with the built-in demo model
# make test   sets everything up and runs the tests
# make lint   style, types, layers, generated reference
#
# PYTHON       the Python to make the environment with (3.10 to 3.13)
# VENV         the environment; made when it is missing
# CONSTRAINTS  a pip constraints file; in CI the versions CI runs with
PYTHON ?= python3
VENV ?= .venv
ifdef CI
CONSTRAINTS ?= .ci/constraints.txt
endif
BIN := $(VENV)/bin

.PHONY: chat test lint

chat: $(VENV)/.ready
	@$(BIN)/specq chat $(ARGS)

test: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m specq.cli.reference --check

$(VENV)/.ready: pyproject.toml .ci/setup
	@bash .ci/setup "$(PYTHON)" "$(VENV)" "$(CONSTRAINTS)" .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml .ci/setup
	@bash .ci/setup "$(PYTHON)" "$(VENV)" "$(CONSTRAINTS)" ".[dev]"
	@touch $@ $(VENV)/.ready
