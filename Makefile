# `make help` lists the targets. Everything runs in .venv, which is made on the first use.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_TEXT := runs/town-archive.txt

.DEFAULT_GOAL := help
.PHONY: help venv test check format docs bench demo

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED) ## make .venv with memagent and all development tools

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

test: venv ## run all tests
	$(BIN)/python -m pytest -n 2

check: venv ## formatting, lint, types, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/codespell

format: venv ## format the code and fix what lint can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## write docs/cli.md again from the command line's help
	$(BIN)/python docs/generate_cli.py

bench: venv ## measure what the reader adds to a model's own time
	$(BIN)/python -m benchmarks.reader

demo: venv ## ask two questions of a generated text with the scripted engine
	@mkdir -p runs
	@$(BIN)/python examples/sample.py > $(DEMO_TEXT)
	$(BIN)/memagent ask $(DEMO_TEXT) --engine scripted --show-memory \
		--run-dir runs/demo-$$(date +%Y%m%d-%H%M%S) \
		-q "Where is the spare key to the clock tower kept?" \
		-q "Who cast the school bell, and how much was paid for it?"
