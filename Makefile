# Everything a person runs: `make demo` and `make test` set up what they need on a fresh machine with Python >= 3.11.
PYTHON ?= python3
PYTHONS ?= 3.11 3.12 3.13
# A Python that was asked for (make test PYTHON=python3.12) gets a virtual environment of its own.
ifneq ($(origin PYTHON),file)
SUFFIX := -$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
VENV ?= .venv$(SUFFIX)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
.DEFAULT_GOAL := help
.PHONY: help demo test pauses test-pythons e2e lint types floors check-proto check bench proto wheel wheel-test container-test lock clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp for each virtual environment, so that a changed lock or pyproject sets it up again.
$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fairlead needs Python 3.11 or newer and this is %s; name another: make PYTHON=python3.12" % sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; Debian and Ubuntu have that in the package python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps --requirement requirements/dev.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/.ready ## run the agent against a simulated kubelet and watch devices come and go
	$(BIN)/fairlead demo $(ARGS)

test: $(VENV)/.ready ## run all tests; ARGS="-k word" for some
	$(BIN)/python -m pytest $(ARGS)

pauses: $(VENV)/.ready ## run tests/e2e with pauses between any two statements, so that what passes by luck fails
	$(BIN)/python -m pytest -p tests.pauses $(or $(ARGS),tests/e2e)

test-pythons: ## run all tests on each supported Python that is here
	@for version in $(PYTHONS); do \
		if python=$$(.ci/find-python $$version); then $(MAKE) test VENV=.venv-$$version PYTHON=$$python || exit; \
		else echo "There is no Python $$version here."; fi; \
	done

e2e: $(VENV)/.ready build/guest/.ready ## boot a kernel in QEMU and run the agent on it; ARGS="--accel tcg" to emulate
	@$(BIN)/python -m compileall -q agent backends tests/e2e tests/guest # the emulated interpreter would take minutes
	$(BIN)/python -m pytest --capture=no -m guest tests/guest $(ARGS)

build/guest/.ready: tests/guest/fetch.sh
	tests/guest/fetch.sh build/guest
	@touch $@

lint: $(VENV)/.ready ## ruff: style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready ## mypy --strict
	$(BIN)/mypy

floors: $(VENV)/.ready ## import-linter: who may import whom
	$(BIN)/lint-imports

check-proto: $(VENV)/.ready ## do the generated modules match proto/?
	$(BIN)/python proto/generate.py --check

check: lint types floors check-proto test ## everything but packaging and benchmarks

bench: $(VENV)/.ready ## measure; writes build/bench.json
	$(BIN)/python -m bench $(ARGS)

proto: $(VENV)/.ready ## generate agent/*/api from proto/
	$(BIN)/python proto/generate.py

wheel: $(VENV)/.ready ## build dist/fairlead-*.whl
	@rm -rf build/lib build/bdist.* dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

wheel-test: wheel ## does the wheel hold everything, and does requirements/run.txt suffice?
	tests/wheel/check.sh $(BIN)/python dist/*.whl

container-test: $(VENV)/.ready build/kustomize/.ready ## build the image on a base made here and try it; needs root, buildah and mmdebstrap
	tests/container/build.sh $(BIN)/python

# What builds deploy/kubernetes, for tests/deploy and the container's test.
build/kustomize/.ready: tests/deploy/fetch.sh
	tests/deploy/fetch.sh build/kustomize
	@touch $@

lock: $(VENV)/.ready ## pin requirements/*.in again, with hashes
	for name in run build dev; do \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
			--custom-compile-command 'make lock' requirements/$$name.in --output-file requirements/$$name.txt || exit; \
	done

clean: ## remove what was built
	rm -rf build dist *.egg-info .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
