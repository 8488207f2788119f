# `make demo` and `make test` need nothing but CPython 3.11+ with venv, g++ and make.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles the modules that it imports; pip would compile all, a third of which are ever used, in half of its time.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt

# Without bytecode each of the tests' thousands of processes compiles the sources anew: 15 % of their time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check lint types docs release sampler clean

demo: .venv/installed
	$(BIN)/carbonopt run studies/quickstart.yaml

# Three at a time, as many of them wait.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: .venv/installed-dev
	$(PYTEST) -m "not slow"

# No more calls than needed: each of pytest's four processes takes 10 s of CPU time to import and collect the tests.
test-all: .venv/installed-dev
	$(PYTEST) -m "not timed"
	$(PYTEST) --dist load -m timed

check: lint types test-all

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: .venv/installed-dev
	$(BIN)/mypy carbonopt tests/typed_script.py

# Into site/; a link that leads nowhere is an error (with --quiet it is not).
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Into dist/, and shows that the wheel works where nothing else is installed and far from this checkout. Takes minutes.
release: .venv/installed-dev
	rm -rf build dist
	$(BIN)/python -m build
	empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && \
	$(PYTHON) -m venv "$$empty/venv" && export PATH="$$empty/venv/bin:$$PATH" && unset PYTHONPATH && \
	python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl && \
	cd "$$empty" && \
	carbonopt --version && \
	carbonopt check $(CURDIR)/studies/quickstart.yaml && \
	carbonopt run $(CURDIR)/docs/examples/replay.yaml

# Into dist/: carbonopt-sampler, of the same source, without torch; and shows that it works where nothing else is.
sampler: .venv/installed-dev
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/python configs/sampler/build.py "$$folder/source" && \
	$(BIN)/python -m build --wheel --outdir dist "$$folder/source" && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/carbonopt_sampler-*.whl && \
	sed -n '/^```python/,/^```/{/^```/d;p}' configs/sampler/README.md > "$$folder/example.py" && \
	cd "$$folder" && unset PYTHONPATH && venv/bin/python example.py

# EXTRAS: what else to install by the same call, such as [dev]; each call of pip takes 10 s of CPU time by itself.
# The constraints pin torch without saying which build: where a GPU is, the package index gives the CUDA one.
.venv/installed: pyproject.toml constraints.txt
	@echo "Installing into .venv. This takes some minutes."
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.$(EXTRAS)'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv runs build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
