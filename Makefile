# `make demo` and `make test` need nothing but CPython 3.11+ with venv, g++ and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check lint types clean

demo: .venv/installed
	$(BIN)/carbonopt run studies/quickstart.yaml

# Two at a time. Some tests measure times, which those beside them disturb: what failed is run again, alone.
test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

check: lint types test

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy carbonopt

# The constraints pin torch without saying which build: where a GPU is, the package index gives the CUDA one.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .pytest_cache .ruff_cache
