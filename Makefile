# Everything a person runs: `make demo` and `make test` set up what they need on a fresh machine with Python >= 3.11.
PYTHON ?= python3
PYTHONS ?= 3.11 3.12 3.13
# A Python that was asked for (make test PYTHON=python3.12) gets a virtual environment of its own.
ifneq ($(origin PYTHON),file)
SUFFIX := -$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
endif
VENV ?= .venv$(SUFFIX)
DEMO ?= .venv-demo$(SUFFIX)
DOCS ?= .venv-docs$(SUFFIX)
# What the virtual environment holds: dev has all, test what most tests need.
LOCK ?= dev
# What another Python might do in its own way: parsers, the event loop, annotations; and the way from a device to a pod. What
# is decided on the way is pure: of each of its rooms a file.
VERSION_TESTS := tests/kubelet tests/config tests/cli tests/console/test_admin_protocol.py tests/console/test_service.py \
	tests/runtime/supervision/test_restarts.py tests/test_at_once.py tests/daemon/test_supervisor.py tests/daemon/test_reload.py \
	tests/daemon/test_state_file.py tests/daemon/test_state_keeper.py tests/discovery tests/hardware \
	tests/health/test_book.py tests/inventory/test_inventory.py tests/placement/test_choice.py tests/claims/test_ledger.py \
	tests/e2e/kubelet/test_kubelet_restarts.py tests/e2e/kubelet/test_two_agents.py tests/e2e/daemon/test_stop.py tests/e2e/hardware/test_hotplug.py \
	tests/runtime/test_workers.py tests/kubernetes
# What reads the clone, in which a first run has left its traces.
TREE_TESTS := tests/test_house.py tests/test_rules.py tests/deploy/kubectl tests/docs/test_release.py
JOBS ?= $(shell expr $$(nproc) + 1)
BIN := $(VENV)/bin
PREFIX ?= /usr/local
# What builds the program for `make install` and `make deb`: the environment for development where there is one.
TOOLS = $(if $(wildcard $(VENV)/.ready),$(VENV),$(DEMO))
SUITES ?= bookworm trixie # Debian 12 and 13
AS ?= root user
.DEFAULT_GOAL := help
.PHONY: help demo test pauses test-versions test-debian12 trees e2e lint types floors check-proto check simulate soak bench proto rules chart wheel wheel-test container-test lock clean site generated release audit install uninstall deb image pin-base

help: ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp for each, so that a changed lock or pyproject sets it up again. The demo's has a tenth of the development's.
$(VENV)/.ready: requirements/$(LOCK).txt pyproject.toml
	@PYTHON=$(PYTHON) tools/environment.sh $(VENV) $(LOCK)
	@touch $@

$(DEMO)/.ready: requirements/run.txt requirements/build.txt pyproject.toml
	@PYTHON=$(PYTHON) tools/environment.sh $(DEMO) run build
	@touch $@

demo: $(DEMO)/.ready ## run the agent against a simulated kubelet and watch devices come and go
	@$(DEMO)/bin/fairlead demo $(ARGS)

test: $(VENV)/.ready ## run all tests side by side; ARGS=-mfast for most of them in a third of the time, ARGS="-k word" for some
	$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder $(ARGS)

pauses: $(VENV)/.ready ## run tests/e2e with pauses between any two statements, so that what passes by luck fails
	$(BIN)/python -m pytest -p tests.pauses $(or $(ARGS),tests/e2e)

test-versions: ## run what can differ between Pythons on each of PYTHONS that is here
	@for version in $(PYTHONS); do \
		if python=$$(.ci/find-python $$version); then \
			echo "-- Python $$version"; \
			$(MAKE) --no-print-directory test VENV=.venv-test-$$version PYTHON=$$python LOCK=test ARGS="$(VERSION_TESTS) $(ARGS)" || exit; \
		else echo "There is no Python $$version here."; fi; \
	done

test-debian12: ## run the same with Debian 12's own Python 3.11.2, whose asyncio has bugs that later ones have not, as a user, in an order by chance
	@AGAIN="$(TREE_TESTS)" $(MAKE) --no-print-directory trees SUITES=bookworm AS=user LOCK=test \
		ARGS="$(VERSION_TESTS) --shuffle $$(od -An -N2 -tu2 /dev/urandom | tr -d ' ') $(ARGS)"

trees: $(VENV)/.ready ## run the tests on fresh trees of Debian's SUITES, AS root and as a user; needs root and mmdebstrap
	@for suite in $(SUITES); do for who in $(AS); do \
		PYTHON=$(BIN)/python LOCK=$(LOCK) tests/trees.sh $$([ $$who = root ] || echo --user) $$suite $(ARGS) || exit; \
	done; done

e2e: $(VENV)/.ready build/guest/.ready ## boot a kernel in QEMU and run the agent on it; ARGS="--accel tcg" to emulate
	@$(BIN)/python -m compileall -q agent backends tests/e2e tests/guest # the emulated interpreter would take minutes
	$(BIN)/python -m pytest --capture=no -m guest tests/guest $(ARGS)

build/guest/.ready: tests/guest/fetch.sh tests/cache.sh
	tests/guest/fetch.sh build/guest
	@touch $@

lint: $(VENV)/.ready ## ruff: style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy deploy/kubectl/kubectl-fairlead

floors: $(VENV)/.ready ## import-linter: who may import whom
	$(BIN)/lint-imports

check-proto: $(VENV)/.ready ## do the generated modules match proto/?
	$(BIN)/python proto/generate.py --check

check: lint types floors check-proto test ## everything but packaging and benchmarks

simulate: $(VENV)/.ready ## a minute of runs in which a seed decides all that goes wrong, and when; ARGS="--seed 7" for that run again
	$(BIN)/python -m tests.deterministic $(ARGS)

soak: $(VENV)/.ready ## break everything at random for 30 minutes, and compare with a model; ARGS="--minutes 5 --seed 7"
	$(BIN)/python -m tests.soak $(ARGS)

bench: $(VENV)/.ready ## measure; writes build/bench.json
	$(BIN)/python -m bench $(ARGS)

proto: $(VENV)/.ready ## generate agent/kubelet/api from proto/
	$(BIN)/python proto/generate.py

$(DOCS)/.ready: requirements/docs.txt
	@PYTHON=$(PYTHON) tools/environment.sh $(DOCS) docs
	@touch $@

# Not --quiet: mkdocs would not count its warnings then, and none would fail it.
site: $(DOCS)/.ready ## build the documentation as a site into build/site; checks its links, and that it loads nothing from elsewhere
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@$(DOCS)/bin/python tools/site_check.py build/site

generated: $(VENV)/.ready ## write docs/configuration.md, docs/licences.md and a part of docs/troubleshooting.md
	$(BIN)/python -m tools.configuration_page
	$(BIN)/python -m tools.reasons_section
	$(BIN)/python -m tools.licences_page

release: $(VENV)/.ready ## make a release's files in dist/ from a clean export of HEAD; ARGS=--rehearse to try it
	tools/release.sh $(BIN)/python $(ARGS)

audit: $(VENV)/.ready ## ask the index which pinned requirements were yanked and which are outdated
	@$(BIN)/python -m tools.audit $(ARGS)

wheel: $(VENV)/.ready ## build dist/fairlead-*.whl
	@rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip --quiet --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir dist .

wheel-test: wheel ## does the wheel hold everything, and does requirements/run.txt suffice?
	tests/wheel/check.sh $(BIN)/python dist/*.whl

install: $(TOOLS)/.ready ## put the program, its unit, man page and completions below PREFIX (/usr/local), after DESTDIR
	@TOOLS=$(TOOLS)/bin/python PYTHON=$(PYTHON) DESTDIR=$(DESTDIR) PREFIX=$(PREFIX) deploy/install.sh install
	@echo "Fairlead is in $(DESTDIR)$(PREFIX); docs/installing.md says how to start or to update the service."

uninstall: ## remove them; configuration and state stay
	@DESTDIR=$(DESTDIR) PREFIX=$(PREFIX) deploy/install.sh uninstall

deb: build/deb/.ready ## build build/deb/fairlead_*.deb for this machine's Debian or Ubuntu
	@ls build/deb/*.deb

build/deb/.ready: $(TOOLS)/.ready config.example.toml CHANGELOG.md README.md pyproject.toml \
		$(shell find agent backends deploy/debian deploy/systemd deploy/install.sh requirements/run.txt -type f -not -name '*.pyc')
	@TOOLS=$(TOOLS)/bin/python deploy/debian/build.sh build/deb
	@touch $@

image: ## build the image with podman, buildah or docker, and as an archive; PLATFORMS="linux/amd64 linux/arm64" BASE=debian
	@deploy/image/build.sh $(ARGS) # make hands down PLATFORMS, BASE, IMAGE and TOOL

pin-base: ## write the digest that the image's base has now into the Containerfile; needs skopeo and the registry
	deploy/image/pin.sh

container-test: $(VENV)/.ready build/kustomize/.ready ## build the image on a base made here and try it; needs root, buildah and mmdebstrap
	tests/container/build.sh $(BIN)/python

# What builds deploy/kubernetes, for tests/deploy and the container's test.
build/kustomize/.ready: tests/deploy/fetch.sh tests/cache.sh
	tests/deploy/fetch.sh build/kustomize kustomize usr/bin/kustomize
	@touch $@

# promtool, which tests the alerts and the dashboards' queries of deploy/observability.
build/promtool/.ready: tests/deploy/fetch.sh tests/cache.sh
	tests/deploy/fetch.sh build/promtool promtool usr/bin/promtool
	@touch $@

# What renders deploy/helm, for tests/deploy.
build/helm/.ready: tests/deploy/fetch-helm.sh | $(VENV)/.ready
	tests/deploy/fetch-helm.sh $(BIN)/python build/helm
	@touch $@

chart: $(VENV)/.ready ## write the configuration's schema into the chart's, and its values into the docs
	$(BIN)/python deploy/helm/schema.py

# Prometheus' operator wants its rules indented, in an object.
rules: ## write deploy/observability/prometheus-rules.yaml from alerts.yaml and fleet.yaml beside it
	@cd deploy/observability && { echo "# Written by \`make rules\` from alerts.yaml and fleet.yaml: change those."; \
		for name in alerts fleet; do \
			printf -- '---\napiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: fairlead-%s\nspec:\n' $$name; \
			grep -v '^#' $$name.yaml | sed 's/^\(.\)/  \1/'; \
		done; } > prometheus-rules.yaml

lock: $(VENV)/.ready ## pin requirements/*.in again, with hashes
	for name in run build test dev docs; do \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
			--custom-compile-command 'make lock' requirements/$$name.in --output-file requirements/$$name.txt || exit; \
	done

clean: ## remove what was built
	rm -rf build dist *.egg-info .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
