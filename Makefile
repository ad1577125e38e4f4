# Each target builds the environment first, so any of them works in a fresh clone.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
READY := .venv/ready

.DEFAULT_GOAL := help
.PHONY: help setup test lint docs bench demo clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/'

setup: $(READY)  ## create .venv with the pinned versions and an editable install

# torch is installed first: the other packages must not replace its version.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,docs]'
	touch $@

# One thread per process, because the tests start many processes. Tests of a file share fixtures, so a file stays in one process.
test: setup  ## run all tests; ARGS="-k ring" selects some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup  ## check style, format, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Generate pages and pictures, then the site. --strict makes dead links errors; --quiet would disable it.
docs: setup  ## build the documentation in build/site
	$(BIN)/python docs/_make/reference.py
	$(BIN)/python docs/_make/architecture.py
	$(BIN)/python docs/_make/timelines.py
	$(BIN)/python docs/_make/architecture.py
	$(BIN)/python docs/_make/strip.py
	$(BIN)/python docs/_make/measured.py
	$(BIN)/python docs/_make/virtual.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	@echo "open build/site/index.html"

bench: setup  ## run the quick throughput benchmark
	$(BIN)/python -m benchmarks.throughput --quick

demo: setup  ## run the whole speech pipeline on a small scale
	$(BIN)/roundelay demo

clean:  ## remove caches and build output, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +
