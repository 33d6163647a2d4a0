# SPDX-License-Identifier: Apache-2.0
# make serve [MODEL=path DRAFT=path ARGS='server flags' PORT=30000]   a server on 127.0.0.1, the small model by default
# make test                                                          every test that needs no GPU
# make lint | format | delta | pr
PYTHON ?= python3.11
PORT ?= 30000
MODEL ?=
DRAFT ?=
ARGS ?=
TESTS ?= test
# Test files run at a time; one file, one process, so that its tests share a server.
JOBS ?= 2
# cuda where a GPU is found, else cpu
SET ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

BIN := .venv/bin
VENV := $(BIN)/python
OVERLAY := cd python && ../$(VENV) -m overlay
OURS := python/overlay scripts test sgl-kernel-sm120 benchmark
UPSTREAM_STYLE := python/sglang
CODE := $(OURS) $(UPSTREAM_STYLE)
export OMP_NUM_THREADS ?= 1

.PHONY: serve test environment test-environment gates lint format delta pr
.DEFAULT_GOAL := test

serve: environment
	@$(VENV) scripts/serve.py --device $(SET) --port $(PORT) --model '$(MODEL)' --draft '$(DRAFT)' --args '$(ARGS)'

test: gates
	$(VENV) -m pytest --numprocesses $(JOBS) --dist loadfile $(TESTS)

# What stops a change before any test runs: the edits and the caps, the kernels' registers and shared memory, and tables
# in the documents that are not those of the result files.
gates: test-environment
	$(OVERLAY) check
	$(VENV) sgl-kernel-sm120/tools/resources.py check
	$(VENV) benchmark/report.py --check

environment:
	@$(PYTHON) scripts/environment.py --set $(SET)

test-environment:
	@$(PYTHON) scripts/environment.py --set $(SET) --tests

lint: test-environment
	$(VENV) -m ruff check $(OURS)
	$(VENV) -m ruff format --check $(OURS)
	$(VENV) -m black --check --quiet $(UPSTREAM_STYLE)
	$(VENV) -m isort --check --quiet $(UPSTREAM_STYLE)
	git ls-files '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -r $(BIN)/clang-format --dry-run --Werror
	git ls-files '*.py' '*.md' '*.toml' '*.cu' '*.cuh' '*.h' '*.cpp' | xargs $(VENV) -m codespell_lib

format: test-environment
	$(VENV) -m ruff check --fix $(OURS)
	$(VENV) -m ruff format $(OURS)
	$(VENV) -m black --quiet $(UPSTREAM_STYLE)
	$(VENV) -m isort --quiet $(UPSTREAM_STYLE)
	git ls-files '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -r $(BIN)/clang-format -i
	$(OVERLAY) delta --write ../README.md

delta: environment
	@$(OVERLAY) delta

pr: environment
	@$(OVERLAY) pr --out ../patches
