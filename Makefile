# Every target builds the environment first, so any of them works as the first command in a fresh clone.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
READY := .venv/ready

.DEFAULT_GOAL := help
.PHONY: help setup test lint docs bench demo clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/'

setup: $(READY)  ## environment in .venv with the pinned versions, and this package installed for editing

# torch comes first and alone: it is by far the largest, and the rest then settles around its version.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,synth,onnx,mpi]'
	touch $@

# One thread per process: the tests start many processes, and threads that fight for cores make them slow. Two files of tests
# at a time; a file stays together, because its tests share what was made for the first of them.
test: setup  ## all tests; ARGS="-k ring" chooses some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup  ## style, format, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Pages and pictures that are made from the code and from records; then the site, on which a dead link is an error.
docs: setup  ## the documentation, as a site in build/site
	$(BIN)/python docs/_make/reference.py
	$(BIN)/python docs/_make/timelines.py
	$(BIN)/python docs/_make/strip.py
	$(BIN)/python docs/_make/measured.py
	$(BIN)/python docs/_make/virtual.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "open build/site/index.html"

bench: setup  ## quick throughput benchmark against the ceiling without communication
	$(BIN)/roundelay bench throughput --quick

demo: setup  ## the whole road on a small scale
	$(BIN)/roundelay demo

clean:  ## remove caches and build leftovers; the environment stays (rm -rf .venv)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +
