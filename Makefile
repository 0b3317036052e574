# `make help` lists the targets. They create .venv first, and again only if pyproject.toml or
# constraints.txt changes.

PYTHON ?= python3
# To skip the CUDA packages on a machine without GPUs:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Further arguments: make test ARGS="-k svt"
ARGS ?=
# make chaos: minutes in which runs start, or SEED=17 for only the run of this integer
MINUTES ?= 30
SEED ?=
# Number of test processes: make test WORKERS=0 for a debugger
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-core test-kernels chaos check docs format clean

# Hundreds of test processes import the same modules, so store compiled modules even if the
# environment disables it.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo          compare two methods on embedded data"
	@echo "make test          run the quick tests              (pytest gets ARGS=...)"
	@echo "make test-slow     run the tests that start clusters, kill processes, or take long"
	@echo "make test-core     run the tests of the core without extensions, on an old processor's kernels"
	@echo "make test-kernels  run the tests of extensions and of all methods on these kernels"
	@echo "make chaos         kill processes of random runs    (MINUTES=30, or SEED=17 to replay one run)"
	@echo "make check         run the linters, the formatter's check and mypy"
	@echo "make docs          build the documentation site in site/"
	@echo "make format        format the code"
	@echo "make setup         create the environment in $(VENV)  (PYTHON=..., TORCH_INDEX=...)"
	@echo "make clean         remove the environment and all caches, but not runs/"

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "trishul-ray needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo absent); set another: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sqlite3' 2>/dev/null || { \
	  echo "'$(PYTHON)' was built without SQLite, which MLflow needs; set another: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV). This takes 2 to 3 minutes, and only once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable '.[dev]'
	@$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true  # pip compiles on one core
	@touch $(STAMP)
	@echo "Set up: $(BIN)/trishul"

# Each worker runs whole files, whose tests share a cluster. Reordering would put files with few, but
# long, tests last. Torch has one thread per worker: workers with more would wait for each other.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

QUICK := not slow and not chaos and not gpu

demo: setup
	$(BIN)/trishul sweep --axis method=fedit,trishul $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(ARGS)

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "(slow or chaos) and not gpu" $(ARGS)

# The core and its tests must be complete without the folders of the extensions. The finder of an
# editable installation would find these folders, so it is removed.
EXTENSIONS := lab|paper
CORE := adapters contract federation methods models spectral tasks \
  experiment test_imports.py
# Other kernels sum in another order, so these tests show that no result depends on the last bits.
OTHER_KERNELS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2

test-core: setup
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	git ls-files -z --cached --others --exclude-standard \
	  | grep -zvE '^(trishul_ray|tests)/($(EXTENSIONS))/' | tar -c --null -T - | tar -x -C "$$folder" && \
	python=$$(pwd)/$(BIN)/python && cd "$$folder" && \
	echo 'import sys; sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]' > sitecustomize.py && \
	PYTHONPATH="$$folder" $(OTHER_KERNELS) OMP_NUM_THREADS=1 "$$python" -m pytest $(PARALLEL) -m "$(QUICK)" $(addprefix tests/,$(CORE)) $(ARGS)

test-kernels: setup
	$(OTHER_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" \
	  tests/lab tests/contract tests/methods $(ARGS)

chaos: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m chaos.kills $(if $(SEED),--seed $(SEED),--minutes $(MINUTES))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/python .ci/prose_check.py

# Only this target needs mkdocs, so its first use installs it. With --quiet, --strict would ignore
# all warnings.
docs: setup
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Built: site/index.html"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
