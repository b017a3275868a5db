# Everything a person runs: `make demo` and `make test` set up what they need on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help demo test lint types floors check-proto check bench proto lock clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# A stamp for each virtual environment, so that a changed lock or pyproject sets it up again.
$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fairlead needs Python 3.11 or newer; say make PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/.ready ## run the agent against a simulated kubelet and watch devices come and go
	$(BIN)/fairlead demo $(ARGS)

test: $(VENV)/.ready ## run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.ready ## ruff: style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready ## mypy --strict
	$(BIN)/mypy

floors: $(VENV)/.ready ## import-linter: who may import whom
	$(BIN)/lint-imports

check-proto: $(VENV)/.ready ## do the generated modules match proto/?
	$(BIN)/python proto/generate.py --check

check: lint types floors check-proto test ## everything but the benchmarks

bench: $(VENV)/.ready ## measure; writes build/bench.json
	$(BIN)/python -m bench $(ARGS)

proto: $(VENV)/.ready ## generate agent/*/api from proto/
	$(BIN)/python proto/generate.py

lock: $(VENV)/.ready ## pin requirements/*.in again, with hashes
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' requirements/run.in --output-file requirements/run.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' requirements/dev.in --output-file requirements/dev.txt

clean: ## remove what was built
	rm -rf build dist *.egg-info $(VENV)
