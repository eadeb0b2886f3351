# Every target sets up its own .venv from the lock file first; nothing else on the machine is used or changed.
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin

.PHONY: demo test lint bench install

demo: install ## Convert a small causal LM into a block-diffusion LM, on a one-node Ray; a few minutes on two cores.
	$(BIN)/limbeck run split --run.seed $(SEED) --run.name demo-seed$(SEED) --overwrite

test: lint ## Everything that must hold.
	NPROC=2 $(BIN)/python -m pytest

lint: install ## Style, floors and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: install ## Every benchmark but the freshness study (which takes half an hour or more: see benchmarks/freshness.py).
	for name in overlap rollout train_step; do NPROC=2 $(BIN)/python benchmarks/$$name.py || exit 1; done

install: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Limbeck needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@
