# make demo        two clusters on this machine serve real text   (LINK=20Mbit RTT=40ms DATA=file.tar.zst REQUESTS=12 SEED=1)
# make test        lint, types, import rules and every test
# make install     only the environment, in .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test
# Versions of these two are tied to each other: docs/dependencies.md.
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
NIXL := $(shell sed -n 's/^\(nixl==.*\)/\1/p' constraints.txt)

flags = $(if $(LINK),--link '$(LINK)') $(if $(RTT),--rtt '$(RTT)') $(if $(DATA),--data '$(DATA)') \
        $(if $(REQUESTS),--requests '$(REQUESTS)') $(if $(SEED),--seed '$(SEED)') $(if $(JSON),--json '$(JSON)')

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(RUN_STAMP)

demo: $(RUN_STAMP)
	@$(BIN)/prfaas demo $(flags)

test: lint
	$(BIN)/pytest

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "prfaas needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: without it in place, resolving NIXL may pull another build of several gigabytes. The package
# `nixl` only adds an import name, and its dependencies are builds that no machine needs both of.
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@$(PIP) install --no-deps '$(NIXL)'
	@touch $@

$(TEST_STAMP): $(RUN_STAMP)
	@echo "installing what tests need"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@
