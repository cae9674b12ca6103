# Everything a developer types. Each target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=

# Many threads allocate large short-lived tensors: two arenas instead of eight a core save about 0.3 GiB.
export MALLOC_ARENA_MAX ?= 2
export PROPHETKV_MODEL_DIR ?= $(CURDIR)/.data/models

.PHONY: demo serve test test-slow lint format bench quality gpu-check gpu-smoke redis weights clean
.DEFAULT_GOAL := demo

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## fetch the models, ingest the sample documents, ask three questions
	PROPHETKV_DATA_DIR=$(CURDIR)/.data $(BIN)/python -m benchmarks.demo

serve: $(VENV)/.installed  ## run the server in the foreground
	PROPHETKV_DATA_DIR=$${PROPHETKV_DATA_DIR:-$(CURDIR)/.data/serve} $(BIN)/prophetkv serve

redis:
	@command -v redis-server >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q redis-server; \
	  else echo "redis-server is needed for the tests: install it, or run make as root on Debian" >&2; exit 1; fi; }

weights: $(VENV)/.installed-dev
	$(BIN)/prophetkv models --fetch all-minilm-l6-v2
	PROPHETKV_DTYPE=float32 $(BIN)/prophetkv models --fetch smollm2-135m-instruct

test: $(VENV)/.installed-dev redis weights  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-dev redis weights  ## the tests that take minutes: twenty kills
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format .

bench: $(VENV)/.installed  ## time to first token over HTTP, ProphetKV against full prefill, and ingestion rate
	PROPHETKV_DATA_DIR=$(CURDIR)/.data $(BIN)/python -m benchmarks.service

QUALITY ?= .data/quality/$(shell date +%Y%m%d-%H%M%S)-$(shell git describe --always --dirty).jsonl
quality: $(VENV)/.installed  ## ten minutes of RULER on the default model; hold it against another with `eval compare`
	PROPHETKV_DATA_DIR=$(CURDIR)/.data $(BIN)/prophetkv eval ruler --out $(QUALITY) --minutes 9 --lengths 1024 \
	  --tasks niah_multikey_1,niah_multivalue,niah_multiquery,vt --samples 8

gpu-check: $(VENV)/.installed-dev  ## kernels and prefills on one GPU, in 8 minutes, with plots
	$(BIN)/python -m benchmarks.gpu_check

gpu-smoke: $(VENV)/.installed-dev  ## the same at tiny shapes without a GPU, to see that it runs
	TRITON_INTERPRET=1 $(BIN)/python -m benchmarks.gpu_check --smoke --out .data/gpu-smoke

clean:
	rm -rf engine/kernels/*.so $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
