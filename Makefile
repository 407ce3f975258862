# make setup | demo | bench | test | test-all | clean.   Everything lives in .venv; nothing else on the machine is touched.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo bench test test-all check clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST_VENV := .venv-torch2.13
# More for pip to install. === takes the build that torchvision matches, and no local one such as 2.13.0+cpu.
WITH ?=
# The set-up is done once for each content of pyproject.toml.
# Test files run side by side in so many processes; a file's tests stay together, and so do their sessions.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile
STAMP := $(VENV)/.setup-$(firstword $(shell cksum < pyproject.toml))
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_FLAGS := $(if $(CI),-qq,)

help:
	@echo "make setup     create $(VENV) and install everything into it (once; a few minutes)"
	@echo "make demo      three parties compare sentences privately with a real MiniLM"
	@echo "make test      ruff, mypy, import contracts and the tests (under 12 minutes on two cores)"
	@echo "make test-all  the same with the slow tests, and once more on torch 2.13"
	@echo "make bench     what privacy costs beside plaintext, within three minutes: a table, and a page to open"
	@echo "make clean     remove the environments and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11, 3.12 or 3.13 found; install one, or say PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setup 1/3: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "setup: '$(PYTHON) -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "setup 2/3: installing secureinfer[hf,bench,dev], and [he] where it can be (PyTorch is the large part; some minutes)"
	@$(PIP) install $(PIP_FLAGS) -e '.[hf,bench,dev]' $(WITH)
	@$(PIP) install $(PIP_FLAGS) --only-binary tenseal -e '.[he]' $(WITH) || \
		echo "setup: CKKS is left out, for TenSEAL could not be installed (it has no wheel for some platforms); MPC is complete." \
			"To try again: $(PIP) install -e '.[he]'"
	@echo "setup 3/3: checking that the installed packages fit together"
	@$(PIP) check
	@rm -f $(VENV)/.setup-*
	@touch $@

demo: setup
	@$(BIN)/secureinfer demo

bench: setup
	@$(BIN)/secureinfer bench --quick

check: setup
	@echo "check: ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "check: mypy --strict"
	@$(BIN)/mypy
	@echo "check: import contracts"
	@$(BIN)/lint-imports

test: check
	@$(PYTEST) -m "not slow"

test-all: check
	@$(PYTEST)
	@echo "test-all: again on the oldest torch that is supported"
	@$(MAKE) --no-print-directory VENV=$(OLDEST_VENV) WITH="'torch===2.13.0'" setup
	@$(OLDEST_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow"

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
