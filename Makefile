# make demo        two clusters on this machine serve real text   (LINK=20Mbit RTT=40ms DATA=file.tar.zst REQUESTS=12 SEED=1)
# make test        lint, types, import rules and every test
# make fidelity    how well the simulator predicts the demo       (JOURNAL=file of an earlier run, REQUESTS=64 SEED=1)
# make paced       a live fleet of 16 paced workers, simulated too (DATA=trace SCALE=12 REQUESTS=200 RATE=10 POLICY=…)
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
.PHONY: help install demo fidelity paced test browser lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(RUN_STAMP)

demo: $(RUN_STAMP)
	@$(BIN)/prfaas demo $(flags)

fidelity: $(TEST_STAMP)
	@$(BIN)/python -m benchmarks.fidelity $(if $(JOURNAL),--journal '$(JOURNAL)') \
	  $(if $(REQUESTS),--requests '$(REQUESTS)') $(if $(SEED),--seed '$(SEED)') $(if $(JSON),--json '$(JSON)')

paced: $(TEST_STAMP)
	@$(BIN)/python -m benchmarks.paced $(if $(DATA),--trace '$(DATA)') $(if $(FLEET),--fleet '$(FLEET)') \
	  $(if $(SCALE),--time-scale '$(SCALE)') $(if $(RATE),--rate '$(RATE)') $(if $(POLICY),--policy '$(POLICY)') \
	  $(if $(REQUESTS),--requests '$(REQUESTS)') $(if $(SEED),--seed '$(SEED)') $(if $(JSON),--json '$(JSON)')

test: lint browser
	$(BIN)/pytest

# One test looks at a report in a real browser; it is skipped, with the reason, where none can be had.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing chromium, for the test that looks at a report"; export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq; apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "no chromium here: the test that looks at a report is skipped (Debian: apt-get install chromium)"

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
	@echo "compiling the scheduler's inner loops (half a minute, kept on disk)"
	@$(BIN)/python -c 'from policies.cost_model import CostModel; from router.core.scheduler import Scheduler; Scheduler(CostModel())'
	@touch $@

$(TEST_STAMP): $(RUN_STAMP)
	@echo "installing what tests need"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@
