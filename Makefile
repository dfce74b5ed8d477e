# make demo: plan and main job, on two CPU ranks.  make test: the tests.  Both build .venv/ first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint venv clean

demo: venv
	$(BIN)/python examples/demo.py

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

venv: .venv/.built

# torch is pinned here; the package itself accepts the range in pyproject.toml.
.venv/.built: pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
