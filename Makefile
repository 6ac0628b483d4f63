# Everything a newcomer needs: make demo, make test. Each target sets up what it needs by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := $(sort $(dir $(wildcard libs/*/pyproject.toml services/*/pyproject.toml)))
READY := $(VENV)/.ready
VLLM := .vllm
ARGS ?=
ONLY ?=

.PHONY: help demo up test test-vllm check bench study load-test explore chaos nixl proto clean
.DEFAULT_GOAL := help

help: ## what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## the main job: a real trace over a mixed fleet, beside round-robin (ARGS="--seconds 30")
	@$(BIN)/quartet demo $(ARGS)

up: $(READY) ## the same fleet, left running until Ctrl-C (ARGS="--ports any")
	@$(BIN)/quartet up $(ARGS)

test: $(READY) ## all tests (ARGS goes to pytest)
	@$(BIN)/python -m pytest $(ARGS)

test-vllm: $(READY) ## the whole way to two real vLLM servers on the CPU (2.3 GB into .vllm, once)
	@$(PYTHON) tests/vllm/install.py $(VLLM)
	@QUARTET_VLLM=$(VLLM) $(BIN)/python -m pytest tests/vllm -v -s $(ARGS)

check: $(READY) ## lint, format, strict types, import rules, fitted profiles, the map
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m quartet_sim.fit --check
	$(BIN)/python docs/map.py --check

bench: $(READY) ## measured figures, one JSON line each (ONLY=decision)
	@$(BIN)/python tests/perf/run.py $(ONLY)

study: $(READY) ## the simulator's tables in docs/simulation.md (ONLY=policies; all of them take about an hour)
	@$(BIN)/quartet simulate --study $(or $(ONLY),all)

load-test: $(READY) ## aiperf, in a virtual environment of its own, against a whole fleet (ARGS="--requests 300")
	@$(BIN)/python tests/load/run.py $(ARGS)

explore: $(READY) ## every story of a KV transfer with up to N faults, invariants checked (ARGS="--faults 1")
	@cd tests && ../$(BIN)/python -m explore.search $(ARGS)

chaos: $(READY) ## a fleet under load whose agents and coordinator are killed at random (ARGS="--seconds 60")
	@$(BIN)/python tests/perf/kv_chaos.py $(ARGS)

nixl: $(READY) ## install the optional NIXL mover, for tests and benches that use it (340 MB)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-nixl.txt

proto: $(READY) ## generate the gRPC stubs anew
	$(BIN)/python libs/rpc/generate.py

clean: ## remove the virtual environment, caches and run directories
	rm -rf $(VENV) .venv-load .run .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.txt requirements-dev.txt requirements-tokenizer.txt pyproject.toml $(addsuffix pyproject.toml,$(DISTRIBUTIONS))
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Quartet needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one with make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "installing pinned requirements into $(VENV) (about half a minute, once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(addprefix -e ./,$(DISTRIBUTIONS))
	@touch $(READY)
