# Copyright (c) qbheat_det contributors. Apache-2.0.
# Two commands are enough: `make demo` and `make test`. Each makes what it needs.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# An index with PyTorch's CPU builds, see docs/install.md; by default PyTorch comes with CUDA.
TORCH_INDEX ?=
ARGS ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Every pip that installs takes the committed versions, also inside the builds of source archives.
# The paths are relative because pip splits these variables at spaces.
# The CPU's builds have versions of their own ("+cpu"), which the committed ones do not name.
CONSTRAINTS := $(if $(TORCH_INDEX),$(VENV)/constraints.txt,constraints.txt)
$(INSTALLED): export PIP_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-device check fuzz bench gpu wheelhouse docs doctor

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## /\1: /p' Makefile | awk -F': ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(INSTALLED) ## make .venv with everything in it (about 2.5 GB to download, 6 GB on disk)

demo: $(INSTALLED) ## train a detector of blood cells in about a minute; report in output/demo
	$(PY) tools/qbheat demo $(ARGS)

test: $(INSTALLED) ## run the tests, without the slow ones
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: $(INSTALLED) ## run the tests, the slow ones too
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-device: $(INSTALLED) ## run every model on a device that does not mix with the CPU
	TEST_DEVICE=1 OMP_NUM_THREADS=1 $(PY) -m pytest tests/device $(ARGS)

check: $(INSTALLED) ## formatting, lint, types, prose (if Vale is installed), tests
	if command -v vale >/dev/null; then vale *.md docs; fi
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

fuzz: $(INSTALLED) ## damage files of every format for ten minutes: no reader may fail
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(ARGS)

bench: $(INSTALLED) ## detectors and pre-training beside their peers; tables in output/bench
	$(PY) -m benchmarks.run $(ARGS)

gpu: $(INSTALLED) ## tests and measurements on a GPU in eight minutes; tables in output/gpu
	$(PY) -m benchmarks.gpu_report $(ARGS)

# Only for this target, PYTHON and TORCH are the versions on the other machine.
wheelhouse: ## wheels for a machine without a network (PYTHON=3.12 TORCH=2.11 HAS=freeze.txt)
	@$(if $(wildcard $(PY)),$(PY),python3) tools/wheelhouse.py $(if $(TORCH),--torch $(TORCH)) \
	$(if $(filter 3.%,$(PYTHON)),--python $(PYTHON)) $(if $(HAS),--has $(HAS)) $(ARGS)

docs: $(INSTALLED) ## the documentation site in build/site, strictly
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

doctor: ## versions, device, datasets, and what is missing
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) tools/doctor.py

# The stamp comes last, so a run that was killed is repaired by the next one: pip goes on where
# it stopped, after the distributions that it left without a RECORD are removed.
$(INSTALLED): setup.py constraints.txt tools/install_detectron2.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: \
	'$(PYTHON)' is no Python 3.10 or newer: name one, as in 'make install PYTHON=python3.11'" >&2; exit 1; }
	@echo "[1/4] a virtual environment in $(VENV)"
ifneq ($(TORCH_INDEX),)
	@mkdir -p $(VENV)
	@grep -vE '^(torch|torchvision|nvidia-|cuda-|triton)' constraints.txt > $(CONSTRAINTS)
endif
	@$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(PY) install pip; } || { echo "error: '$(PYTHON)' cannot make \
	virtual environments: install its venv module (on Debian: apt install python3-venv)" >&2; exit 1; }
	@find $(VENV)/lib -maxdepth 3 \( -name '~*' -o -name '*.dist-info' ! -exec test -e '{}/RECORD' ';' \) \
	-prune -exec rm -r '{}' +
	@$(PY) -m pip install --quiet --upgrade pip
ifneq ($(TORCH_INDEX),)
	@echo "[2/4] PyTorch from $(TORCH_INDEX)"
	@PIP_CONSTRAINT= $(PY) -m pip install --index-url $(TORCH_INDEX) torch torchvision
else
	@echo "[2/4] PyTorch with its CUDA libraries, which also runs without a GPU: about 2.5 GB"
	@$(PY) -m pip install torch torchvision
endif
	@echo "[3/4] Detectron2"
	@$(PY) tools/install_detectron2.py
	@echo "[4/4] qbheat_det and the libraries that remain"
	@$(PY) -m pip install --editable '.[bench,dev,docs,eval,export,opencv,openvino,serve]'
	@touch $@
	@echo "Installed in $(VENV)."
