# SPDX-License-Identifier: Apache-2.0
# make serve [MODEL=path DRAFT=path ARGS='server flags' PORT=30000]   a server on 127.0.0.1, the small model by default
# make test                                                          every test that needs no GPU
# make lint | format | delta | pr
# make release [CUDA=1]; make check-release                          the wheels of a release in dist/, and their check
# make help                                                          these lines
# The interpreter of .venv; empty: the one that .venv has, else the first that upstream has a wheel for.
PYTHON ?=
PORT ?= 30000
MODEL ?=
DRAFT ?=
ARGS ?=
TESTS ?= test
# Test files that run at a time; one file, one process, so that its tests share a server. Three were no faster on two cores.
JOBS ?= 2
# cuda where a GPU is found, else cpu
ifndef SET
SET := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif

BIN := .venv/bin
VENV := $(BIN)/python
OVERLAY := cd python && ../$(VENV) -m overlay
OURS := python/overlay scripts docker test sgl-kernel-sm120 benchmark
# At upstream's paths: upstream's formatter, import order and lint rules.
UPSTREAM_STYLE := python/sglang test/registered
export MODEL DRAFT ARGS PORT
# Images set this. Every process of a server, and of the tests, would then compile torch and sglang anew: 15 s of a core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve test environment test-environment gates check-kernels check-edits check-tables lint format delta pr release check-release
.DEFAULT_GOAL := test

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

serve: environment
	@exec $(VENV) scripts/serve.py --device $(SET) --port="$$PORT" --model="$$MODEL" --draft="$$DRAFT" --args="$$ARGS"

# Longest files first, by the order that test/conftest.py gives them. Pools of threads that spin on the same cores are
# slower than one thread.
CPU_TESTS := OMP_NUM_THREADS=1 $(VENV) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

ifeq ($(SET),cuda)
# Tests of the CPU see no GPU; those of the GPU have it to themselves. 5: none of TESTS is of this kind.
test: gates
	CUDA_VISIBLE_DEVICES= $(CPU_TESTS) -m 'not gpu' $(TESTS) || test $$? -eq 5
	$(VENV) -m pytest -m gpu $(TESTS) || test $$? -eq 5
else
test: gates
	$(CPU_TESTS) $(TESTS)
endif

# What stops a change before any test runs: the edits and the caps, the kernels' registers and shared memory, and tables
# in the documents that are not those of the result files. The kernels compile beside pip, which takes one core.
gates:
	@$(MAKE) --no-print-directory --jobs=2 check-kernels check-edits check-tables

check-kernels:
	@python=$$(sh scripts/find_python.sh '$(PYTHON)') && nice "$$python" sgl-kernel-sm120/tools/resources.py check

check-edits: test-environment
	$(OVERLAY) check

check-tables: test-environment
	$(VENV) benchmark/report.py --check

environment:
	@python=$$(sh scripts/find_python.sh '$(PYTHON)') && exec "$$python" scripts/environment.py --set $(SET)

test-environment:
	@python=$$(sh scripts/find_python.sh '$(PYTHON)') && exec "$$python" scripts/environment.py --set $(SET) --tests

lint: test-environment
	$(VENV) -m ruff check $(OURS)
	$(VENV) -m ruff format --check $(OURS)
	$(VENV) -m ruff check --config python/upstream-style.toml $(UPSTREAM_STYLE)
	$(VENV) -m ruff format --check --config python/upstream-style.toml $(UPSTREAM_STYLE)
	$(VENV) -m isort --check --quiet $(UPSTREAM_STYLE)
	git ls-files '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -r $(BIN)/clang-format --dry-run --Werror
	git ls-files '*.py' '*.md' '*.toml' '*.cu' '*.cuh' '*.h' '*.cpp' | xargs $(VENV) -m codespell_lib

format: test-environment
	$(VENV) -m ruff check --fix $(OURS)
	$(VENV) -m ruff format $(OURS)
	$(VENV) -m ruff check --fix --config python/upstream-style.toml $(UPSTREAM_STYLE)
	$(VENV) -m isort --quiet $(UPSTREAM_STYLE)
	$(VENV) -m ruff format --config python/upstream-style.toml $(UPSTREAM_STYLE)
	git ls-files '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -r $(BIN)/clang-format -i
	$(OVERLAY) delta --write ../README.md

delta: environment
	@$(OVERLAY) delta

pr: environment
	@$(OVERLAY) pr --out '$(CURDIR)/patches'

# From a clean commit; CUDA=1: also the kernel package with CUDA code, which compiles for minutes.
release:
	@python=$$(sh scripts/find_python.sh '$(PYTHON)') && cd python && "$$python" -m overlay release --out ../dist $(if $(CUDA),--cuda)

check-release:
	@python=$$(sh scripts/find_python.sh '$(PYTHON)') && cd python && "$$python" -m overlay check-release --out ../dist
