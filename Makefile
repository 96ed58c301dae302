# `make setup` builds .venv; every other target calls it first and costs nothing when nothing changed.
.DEFAULT_GOAL := help
SHELL := /bin/bash

BIN := .venv/bin
STAMP := .venv/.stamp
CORE := $(wildcard csrc/*/*.c csrc/*/*.h)
CORE_FLAGS := -std=c11 -O3 -Wall -Wextra -Werror -DPy_LIMITED_API=0x030B0000
INCLUDE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
FOLDERS := $(wildcard src tests scripts examples setup.py)

.PHONY: help setup demo test lint format bench mpi soak faults test-sanitize test-threads clean

help:
	@echo "make setup          build .venv with allhands and its tools"
	@echo "make demo           train on four ranks, and the same on torch's DDP over Gloo"
	@echo "make test           lint, types and tests"
	@echo "make lint           ruff, mypy and the C compiler's warnings"
	@echo "make format         reformat"
	@echo "make bench          measure the roll call, and collectives against Gloo and MPI (minutes)"
	@echo "make mpi            install Open MPI and mpi4py, where they are missing"
	@echo "make soak           the tests that take minutes, and the C core under sanitizers"
	@echo "make faults         inject every fault under torch alone and under allhands; write docs/faults.md (minutes)"
	@echo "make clean          remove all that the other targets made"

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(CORE)
	@command -v $(firstword $(CC)) >/dev/null || { \
	  echo "allhands has a small C core and no C compiler ($(CC)) was found: install gcc, or set CC=" >&2; exit 1; }
	@if [ ! -x $(BIN)/python ]; then \
	  found=""; \
	  for candidate in $(PYTHON) python3.11 python3 python3.13 python3.12; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "allhands needs Python 3.11 or later; found: $$(python3 --version 2>&1). Set PYTHON=" >&2; exit 1; fi; \
	  "$$found" -m venv .venv; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt \
	  -e '.[dev,examples]'
	# As an installation does; with PYTHONDONTWRITEBYTECODE every rank would compile all modules at every start.
	@$(BIN)/python -m compileall -q src
	@touch $@

# Ranks of the launcher write into pipes, so --terminal names the terminal for the progress bar.
demo: setup
	@mkdir -p build
	$(BIN)/allhands run -n 4 --no-prefix examples/digits.py --against-gloo --plot build/digits.png \
	  --terminal "$$([ -t 2 ] && readlink /proc/self/fd/2)"

# pytest is last, so that its summary is at the end of the output. Ranks wait more than they compute, so three files at a
# time use two cores. Lint and the sanitizers each use one core, so they run in parallel.
test: setup
	$(MAKE) -j2 lint test-sanitize test-threads
	$(BIN)/python -m pytest -n 3 --dist loadfile

lint: setup
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/mypy --strict src scripts
	$(CC) -fsyntax-only $(CORE_FLAGS) -Icsrc -I$(INCLUDE) csrc/*/*.c

format: setup
	$(BIN)/ruff check --fix-only $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

# AGAINST=gloo needs no MPI; RANKS, SIZES and OPERATIONS select the measurements.
AGAINST ?= gloo,mpi
RANKS ?= 2 4
SIZES ?= 4,1K,64K,1M,16M,64M,256M
OPERATIONS ?= all_reduce broadcast all_gather reduce_scatter all_to_all send_recv
bench: setup $(if $(findstring mpi,$(AGAINST)),mpi)
	$(BIN)/allhands bench rollcall
	@set -e; for operation in $(OPERATIONS); do for ranks in $(RANKS); do \
	  echo; echo "allhands bench $$operation --ranks $$ranks --sizes $(SIZES) --against $(AGAINST) --floor"; \
	  $(BIN)/allhands bench $$operation --ranks $$ranks --sizes $(SIZES) --against $(AGAINST) --floor; \
	done; done

mpi: setup
	$(BIN)/python scripts/install_mpi.py

soak: setup test-sanitize test-threads
	$(BUILD)/collectives_stress $$RANDOM 100000
	$(SANITIZED) $(BIN)/python -m pytest -q -s -p no:cacheprovider -m soak tests/soak/test_random.py -k core
	$(BIN)/python -m pytest -m soak
	$(BIN)/python scripts/import_cost.py

# Without measurements of earlier runs.
faults: setup
	rm -rf build/faults
	$(BIN)/python -m pytest -n 3 -m soak tests/soak/test_faults.py
	$(BIN)/python scripts/faults.py

# The C core's tests against a build that stops at the first bad access or undefined behaviour. The build is in a copy of the
# package, so the installed one stays as it is. Leaks are not checked: CPython frees much only at exit.
SANITIZE := build/sanitize
SANITIZED = LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
  PYTHONPATH=$(SANITIZE)
test-sanitize: setup
	@mkdir -p $(SANITIZE)
	@rm -rf $(SANITIZE)/allhands && cp -r src/allhands $(SANITIZE)/allhands && rm -f $(SANITIZE)/allhands/*.so
	$(CC) -shared -fPIC -g $(CORE_FLAGS) -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc -I$(INCLUDE) \
	  csrc/*/*.c -lm -o $(SANITIZE)/allhands/_core.abi3.so
	$(SANITIZED) $(BIN)/python -c 'import allhands._core as core; assert "sanitize" in core.__file__'
	$(SANITIZED) $(BIN)/python -m pytest -q -p no:cacheprovider -n 2 $(filter-out %/test_call_lock.py,$(wildcard tests/unit/core/test_*.py))

# Data races of the C core: threads as ranks on one mapping, with every folder but python/, which alone includes Python.h.
# -Wno-tsan: gcc warns that it does not model fences; the core's fences order wake-ups, not data.
BUILD := build/threads
PLAIN = $(filter-out csrc/python/%,$(wildcard csrc/*/*.c))
test-threads: $(CORE) $(wildcard tests/native/*.c)
	@mkdir -p $(BUILD)
	@set -e; for program in cico_slot collectives_stress p2p_stress; do \
	  echo "$$program, with -fsanitize=thread"; \
	  $(CC) -g -O2 -std=c11 -Wall -Wextra -Werror -Wno-tsan -fsanitize=thread -Icsrc tests/native/$$program.c $(PLAIN) \
	    -lm -lpthread -o $(BUILD)/$$program; \
	done
	$(BUILD)/cico_slot
	$(BUILD)/collectives_stress 1 5000
	$(BUILD)/p2p_stress

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src csrc tests scripts -name '*.so' -delete
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
