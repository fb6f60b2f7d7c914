# qkv: one Transformer from which every Transformer is made.
#
#   make demo      a small model trains, generates and proves itself, with the runtime dependencies only
#   make test      the tests in a few minutes, without the slow ones
#   make test-all  every test: full products, long runs, real models (QKV_DATA says where the files are)
#   make lint      ruff, rules and format
#   make types     mypy, strict
#   make clean     remove what tools left behind (the environment stays)
#
# The environment .venv is made when first needed. Pick another interpreter with PYTHON=python3.12.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e
CODE := $(wildcard src tests examples benchmarks)
# Two tests at a time; each has one thread (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 2 -ra

.PHONY: demo test test-all lint types clean
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime
	$(BIN)/qkv demo

test: $(VENV)/.dev
	$(call both,)

test-all: $(VENV)/.dev
	$(call both,--slow)

# Shapes are checked in a first process. What compiles or measures time runs in a second one, without the checks; it
# runs also where the first one failed.
define both
	@status=0; \
	QKV_SHAPES=1 $(PYTEST) $(1) -m "not unhooked" || status=$$?; \
	QKV_SHAPES=0 $(PYTEST) $(1) -m unhooked || status=$$?; \
	exit $$status
endef

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "qkv needs Python 3.11 or newer: make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)

# The stamps keep an installation from being repeated; a change of the dependencies repeats it.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.runtime
