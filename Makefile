# All development and CI tasks. Requires only Python 3.11 to 3.13 and make.

PY ?= python3
BIN := .venv/bin
CONFIG ?= serve_config.yaml
URL ?= http://127.0.0.1:8000
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install clients serve test check fast format e2e test-faults sanitize gpu loadtest models bench

help:  ## list all targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

install: $(STAMP)  ## create .venv and install the locked versions

# requirements.lock is `pip freeze --exclude-editable` of a new environment after `pip install -e '.[dev,loadtest]'`,
# without the `+cpu` of torch's version; clients.lock is `pip freeze` of one with the packages that tests/e2e/clients uses.
$(STAMP): requirements.lock pyproject.toml
	@$(PY) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is required; set PY: make $(MAKECMDGOALS) PY=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PY) -m venv .venv
	@echo "installing the locked versions into .venv; this takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

clients: .venv-clients/.installed  ## install the client packages of tests/e2e/clients, in .venv-clients

.venv-clients/.installed: clients.lock tests/e2e/clients/package-lock.json
	test -x .venv-clients/bin/python || $(PY) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r clients.lock
	if command -v npm >/dev/null; then npm ci --silent --ignore-scripts --prefix tests/e2e/clients; fi
	@touch $@

serve: $(STAMP)  ## start the server (CONFIG=serve_config.yaml)
	@$(BIN)/python -m app.cli.entry serve $(CONFIG)

# Test files run in parallel, one per core (at most 8); tests that start a server run one at a time.
# By default files with few tests come last: one that takes minutes would run alone.
test: $(STAMP)  ## run all tests, including those that start a server; not those that need a GPU or take minutes
	$(BIN)/python -m pytest -m "not gpu and not thorough and not e2e" -n logical --maxprocesses 8 --dist loadfile \
		--no-loadscope-reorder
	$(BIN)/python -m pytest -m "e2e and not thorough" tests/e2e

check: $(STAMP)  ## run what CI runs: format, lint, types, layers, tests
	$(MAKE) --no-print-directory fast
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

fast: $(STAMP)  ## run the fast part of check (seconds): format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)  ## reformat and fix files so that `fast` passes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

e2e: $(STAMP)  ## run only the tests that start a real server
	$(BIN)/python -m pytest -m e2e tests/e2e

test-faults: $(STAMP)  ## run only the tests that kill, stop or starve parts of a server (docs/faults.md); takes minutes
	$(BIN)/python -m pytest $(addprefix tests/e2e/test_,$(addsuffix .py,faults nodes accounts batches disk stop))

# The sanitizer finds the C++ exception functions only if libstdc++ is preloaded too.
sanitize: $(STAMP)  ## run the CPU kernel tests under g++'s address and undefined-behavior sanitizers
	CXX="g++ -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined" ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -m "not gpu and not thorough and not e2e" tests/engine/cpu \
		$(patsubst kernels/%/cpu.cpp,tests/kernels/test_%.py,$(wildcard kernels/*/cpu.cpp)) tests/kernels/test_program.py

gpu: $(STAMP)  ## run only the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

loadtest: $(STAMP)  ## load-test a running server (URL=http://127.0.0.1:8000) and write a report
	$(BIN)/python -m loadtest.run --host $(URL) $(ARGS)

models: $(STAMP)  ## retrain the bundled models
	$(BIN)/python -m models.recipe.build $(ARGS)

bench: $(STAMP)  ## benchmark the engine alone (ARGS="--help" for its options)
	$(BIN)/python -m loadtest.bench_engine $(ARGS)
