# Two commands do everything on a fresh machine:
#   make demo    set up, run one federated run on embedded data, say where to look
#   make test    set up, run the tests
#   make test-slow     those that start clusters, kill processes, or take long
#   make test-core     those of the core, in a copy without the extensions, on other kernels
#   make test-kernels  those of extensions and of all methods, on other kernels
#   make docs    build the documentation site in site/
#   make chaos MINUTES=N    runs whose processes are killed at drawn moments
# Set-up is done once; it is repeated only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
# A CPU-only machine spares itself the CUDA packages with
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Further arguments: make test ARGS="-k svt"
ARGS ?=
# make chaos: minutes in which runs begin, or SEED=17 for the run of this integer alone
MINUTES ?= 30
SEED ?=
# Processes that run tests: make test WORKERS=0 for a debugger
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-core test-kernels chaos check docs format clean

# Compiled modules are stored even where the environment says not to: hundreds of processes of the
# tests import the same ones.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo    set up, then one federated run on embedded data"
	@echo "make test    set up, then the tests                 (ARGS=... goes to pytest)"
	@echo "make test-slow     the tests that start clusters, kill processes, or take long"
	@echo "make test-core     the tests of the core, without the extensions, with an old processor's kernels"
	@echo "make test-kernels  the tests of extensions and of all methods, with those kernels"
	@echo "make chaos MINUTES=30  kill processes of drawn runs; SEED=17 replays one"
	@echo "make check   set up, then lint, format and types"
	@echo "make docs    set up, then build the documentation site in site/"
	@echo "make format  rewrite the code in the house format"
	@echo "make setup   only the environment, in $(VENV)        (PYTHON=..., TORCH_INDEX=...)"
	@echo "make clean   remove the environment and all caches; runs/ is kept"

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "trishul-ray needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo absent); name another: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sqlite3' 2>/dev/null || { \
	  echo "'$(PYTHON)' was built without SQLite, in which MLflow stores runs; name another: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV): PyTorch first, then the rest; some minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable '.[dev]'
	@$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true  # pip compiles on one core
	@touch $(STAMP)
	@echo "Set up: $(BIN)/trishul"

# Each worker takes whole files, whose tests share a cluster; the long ones do not come last. Torch
# has a thread in each worker: two that use both cores would wait for each other.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

QUICK := not slow and not chaos and not gpu

demo: setup
	$(BIN)/trishul run --central $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(ARGS)

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "(slow or chaos) and not gpu" $(ARGS)

# Without the folders of the extensions, the core and its tests are whole. The finder of an editable
# installation would find them, and is left out.
EXTENSIONS := lab|paper
CORE := adapters contract federation methods models spectral tasks \
  experiment test_imports.py
# Other kernels sum in another order: what passes on both rests on no processor's last bits.
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

# The builder is installed with its first use: only this target needs it. With --quiet, --strict
# would miss all warnings.
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
