# make train   from a fresh clone to a trained model, its loss curve and a sample of its text
# make test    the core's tests          make test-research   those of research/
# make soak    all tests with their full number of cases (more than an hour)
# make golden  compare with the runs and shards of an earlier version, bit for bit (tests/golden)
# make lint    run ruff, check and format    make clean  remove caches and the corpus; runs stay
#
# ARGS is passed to train.py: make train ARGS="--max_steps=20". Each value of ARGS has its own run folder, which is named
# after the config file, the first arguments and a hash of all arguments, unless ARGS contains --out_dir=FOLDER.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Compiling all modules to bytecode would take 40 seconds; Python compiles those that are imported. It must be
# allowed to keep the bytecode, which containers often forbid: every start would take seconds longer.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
CONFIG ?= config/demo_cpu.py
ARGS ?=
CORPUS := data/python_stdlib/meta.json
quoted = '$(subst ','\'',$(strip $(ARGS)))'
settings = $(shell printf %s $(quoted) | sed -E 's/^--//; s/ +--/,/g; s/$$/,/; s/^(.{0,64}),.*/\1/' \
  | tr -c 'A-Za-z0-9.,=_-' _ | cut -c1-64)
digest = $(shell printf %s $(quoted) | sha256sum | cut -c1-8)
given := $(lastword $(filter --out_dir=%,$(ARGS)))
RUN := $(or $(patsubst --out_dir=%,%,$(given)),runs/$(basename $(notdir $(CONFIG)))$(if $(strip $(ARGS)),-$(settings)-$(digest)))

.PHONY: train test test-research soak golden lint format clean

# Exit code 75 means that the run was stopped after saving a checkpoint (docs/runs.md). Nothing has
# failed, but there is no final model yet to plot and sample.
train: .venv/installed $(CORPUS)
	@code=0; $(BIN)/python train.py $(CONFIG) --out_dir="$(RUN)" --resume=auto $(ARGS) || code=$$?; \
	if [ $$code = 75 ]; then echo "run the same make command again to resume"; exit 0; fi; \
	if [ $$code != 0 ]; then exit $$code; fi; \
	$(BIN)/python -m training.plot "$(RUN)"; \
	$(BIN)/python sample.py "$(RUN)" --prompt="def" --num_samples=3 --max_new_tokens=150 | tee "$(RUN)/sample.txt"

test: .venv/installed-dev $(CORPUS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist=worksteal

test-research: .venv/installed-dev $(CORPUS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist=worksteal research/tests

soak: .venv/installed-dev $(CORPUS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not golden" tests research/tests

golden: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist=worksteal tests/test_golden.py -m golden

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "needs Python 3.11 to 3.13, found $$($(PYTHON) -V): make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing requirements.txt into .venv (about two minutes)"
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -r requirements.txt
	@touch $@

.venv/installed-dev: requirements-dev.txt requirements-page.txt requirements-research.txt .venv/installed
	@echo "installing requirements-dev.txt into .venv"
	$(PIP_INSTALL) -r requirements-dev.txt
	@touch $@

$(CORPUS): .venv/installed data/python_stdlib/prepare.py
	$(BIN)/python data/python_stdlib/prepare.py --overwrite
	@touch $@

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
	rm -f data/python_stdlib/*.bin data/python_stdlib/*.json
