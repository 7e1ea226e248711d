# Everything a contributor runs. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := src tests $(wildcard benchmarks) $(wildcard examples)

# More workers than cores, since tests often wait for servers and processes; the one that is free
# takes over what another has not begun.
PYTEST = $(BIN)/pytest -q --dist worksteal \
	-n $(shell $(BIN)/python -c "import os; print((os.cpu_count() or 1) * 3 // 2)")

# The parts of pyproject.toml that the lock pins: the core always, and these.
LOCKED := --extra embedded --extra archive --extra crypto --extra aws --extra otel --group dev \
	--group build --group interop
COMPILE := uv --system-certs pip compile --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## create .venv with everything needed for development

# The stamp is written last, so an interrupted setup starts over. A usable interpreter is one that
# is new enough and can create an environment: Debian ships python3 without ensurepip.
$(READY): requirements-dev.txt pyproject.toml
	@for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
		if "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null; then python="$$name"; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then \
		echo "Penstock needs Python 3.11 or newer with the venv and ensurepip modules," >&2; \
		echo "and none is on PATH. On Debian or Ubuntu: apt install python3-venv." >&2; \
		exit 1; \
	fi; \
	"$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-compile \
		-r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation -e .
	@touch $@

.PHONY: lint
lint: $(READY) ## format, lint, types and import rules
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

.PHONY: check
check: lint ## lint, then tidy rules and fast tests
	$(PYTEST) -m "not slow and not long"

.PHONY: test
test: lint ## lint, then all tests but the long ones
	$(PYTEST) -m "not long"

.PHONY: long
long: $(READY) ## tests that go deeper than every run can afford: each fault, each model, each row
	$(PYTEST) -m long

.PHONY: demo
demo: $(READY) ## watch events flow, on servers that need no installation
	$(BIN)/penstock demo

.PHONY: crash-matrix
crash-matrix: $(READY) ## crash at every signal and prove that nothing is lost or repeated
	$(BIN)/python -m tests.crash_matrix

.PHONY: fleet
fleet: $(READY) ## kill, pause and add hosts under load, and measure who waited how long
	$(BIN)/python -m tests.fleet_drill

.PHONY: failures
failures: $(READY) ## make keys fail and kill workers, and measure what the other keys notice
	$(BIN)/python -m tests.failure_drill
	$(BIN)/python -m tests.backlog_drill
	$(BIN)/python -m tests.redrive_drill

.PHONY: recovery
recovery: $(READY) ## strike processes and servers under load, and measure how soon work goes on
	$(BIN)/python -m tests.recovery_drill

.PHONY: brownout
brownout: $(READY) ## measure what consumers and senders keep while Redis is down
	$(BIN)/python -m tests.brownout_drill

.PHONY: history-drill
history-drill: $(READY) ## read a million archived events, then the outbox, then live ones
	$(BIN)/python -m tests.history_drill

.PHONY: archive-drill
archive-drill: $(READY) ## archive a million events, killed at every signal, into a store that fails
	$(BIN)/python -m tests.archive_drill

.PHONY: timer-drill
timer-drill: $(READY) ## fire 100,000 timers with schedulers killed, stopped, and with wrong clocks
	$(BIN)/python -m tests.timer_drill
	$(BIN)/python -m tests.timer_drill --timers 20000 --seconds 20 --skew
	$(BIN)/python -m tests.timer_races_drill

.PHONY: redis-timer-drill
redis-timer-drill: $(READY) ## handle 100,000 Redis timers with workers killed, stopped, and with wrong clocks
	$(BIN)/python -m tests.redis_timer_drill
	$(BIN)/python -m tests.redis_timer_drill --timers 20000 --once
	$(BIN)/python -m tests.redis_timer_drill --timers 20000 --seconds 20 --skew

.PHONY: alert-drill
alert-drill: $(READY) ## bring about what each alert is for, and see it fire, alone, and end
	$(BIN)/python -m tests.alert_drill

.PHONY: scale-drill
scale-drill: $(READY) ## time status and a scrape at a hundred streams with ten consumers each
	$(BIN)/python -m tests.scale_drill

.PHONY: mountain
mountain: $(READY) ## work off ten million events: memory, lag query, speed; takes 25 GB of disk
	$(BIN)/python -m tests.mountain_drill

# HOURS=8 goes on, run after run, until one fails or the time is over.
.PHONY: chaos
chaos: $(READY) ## hurt servers, network and processes for four minutes, and prove what holds
	$(BIN)/python -m tests.chaos $(if $(HOURS),--hours $(HOURS))

.PHONY: chaos-mutants
chaos-mutants: $(READY) ## plant bugs, one at a time, and see that chaos finds each
	$(BIN)/python -m tests.chaos.mutants

.PHONY: simulate
simulate: $(READY) ## try random interleavings and faults on models of the stores
	$(BIN)/python -m tests.simulation --histories 100000

# The specification's schema is not ours to keep here, and lives where npm fetches it from.
SPECIFICATION := $(CURDIR)/$(VENV)/asyncapi
.PHONY: asyncapi
asyncapi: $(READY) ## hold the AsyncAPI document against the specification's own schema; needs npm
	@mkdir -p $(SPECIFICATION)
	cd $(SPECIFICATION) && npm pack --silent @asyncapi/specs && tar xzf asyncapi-specs-*.tgz
	PENSTOCK_ASYNCAPI_SCHEMA=$(SPECIFICATION)/package/schemas/3.0.0.json \
		$(PYTEST) tests/test_schema_docs.py

.PHONY: bench
bench: $(READY) ## measure throughput and latency
	$(BIN)/python -m benchmarks

.PHONY: bench-cleanup
bench-cleanup: $(READY) ## measure what cleanup costs the line, at ten million rows
	$(BIN)/python -m benchmarks.cleanup --rows 10000000

.PHONY: docs
docs: $(READY) ## write the pages that are made from the code
	$(BIN)/python -m tests.signal_docs

.PHONY: format
format: $(READY) ## format the code and fix what can be fixed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# uv alone can resolve for all platforms at once, so it is fetched when it is needed.
.PHONY: lock
lock: $(READY) ## pin the newest versions in requirements-dev.txt
	@[ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/$(COMPILE) --upgrade --quiet $(LOCKED) --output-file requirements-dev.txt pyproject.toml
	@echo "requirements-dev.txt is new: run make setup to install it"

.PHONY: clean
clean: ## remove the environment, caches and build results
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
