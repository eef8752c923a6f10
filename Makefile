# `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-kernels test-vllm test-sglang chaos simulate lint types unit docs clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Built anew only when the lock file or the package metadata changes.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drumroll needs Python 3.11 or later; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(INSTALLED)

install: $(INSTALLED)  ## Make .venv with the exact versions of requirements.lock

demo: install  ## Train a tiny model by RL on the CPU and show what it learnt (about 2 minutes)
	$(BIN)/drumroll train recipes/quickstart.yaml

test: install lint types unit  ## Everything that CI runs: lint, strict types, all tests

KERNELS := .kernels

test-kernels: install  ## The GPU kernels in Triton's interpreter, on the CPU (a download of 1 GB, then about 3 minutes)
	test -d $(KERNELS)/triton || $(BIN)/python -m pip install --quiet --no-deps --target $(KERNELS) triton==3.9.0
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest tests/contract/test_infer_paged.py tests/unit/backends/test_head_kernels.py

VLLM := .venv-vllm

$(VLLM)/.installed: requirements-vllm.lock pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r requirements-vllm.lock
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $(VLLM)/.installed

test-vllm: $(VLLM)/.installed  ## The vLLM engine on the CPU, in an environment of its own (.venv-vllm; about 8 minutes after installing)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/contract/test_infer_backends.py tests/contract/test_infer_vllm.py tests/e2e/test_vllm_runs.py -k vllm

SGLANG := .venv-sglang

# torchvision registers operators of its CUDA library, which there is none of here; SGLang only wants to import it.
$(SGLANG)/.installed: requirements.lock requirements-sglang.lock pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet -r requirements.lock
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r requirements-sglang.lock
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --editable .
	for file in $(SGLANG)/lib/python3*/site-packages/torchvision/_meta_registrations.py; do : > $$file; done
	@touch $(SGLANG)/.installed

test-sglang: $(SGLANG)/.installed  ## The SGLang engine on the CPU, in an environment of its own (.venv-sglang; about 15 minutes after installing)
	PYTHONPATH=$(CURDIR)/tests/sglang_cpu OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/contract/test_infer_backends.py tests/contract/test_infer_sglang.py tests/e2e/test_sglang_runs.py -k sglang

chaos: install  ## Workers and controllers that are killed, frozen, cut off and poisoned, for about an hour and a half
	$(BIN)/python -m pytest tests/faults
	$(BIN)/python -m pytest tests/e2e/test_resume.py -k supervise
	$(BIN)/python tests/faults/chaos.py $$(mktemp -d)
	$(BIN)/python tests/e2e/killpoints.py $$(mktemp -d) --kills 50 --seed 11
	$(BIN)/python tests/e2e/chaos.py $$(mktemp -d) --kills 50 --seed 11

simulate: install  ## 10,000 random schedules with faults through the rollout scheduler, in virtual time (about 3 minutes)
	$(BIN)/python tests/unit/rollout/random_schedules.py --seeds 10000 --jobs 2

lint: install  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: install  ## Write docs/config.md anew from the config's own docstrings
	$(BIN)/python -m drumroll.config.reference > docs/config.md

types: install  ## Strict type checking
	$(BIN)/mypy

unit: install  ## The test suite
	$(BIN)/python -m pytest

clean:  ## Remove the environment and caches
	rm -rf $(VENV) $(KERNELS) $(VLLM) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
