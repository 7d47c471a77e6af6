# Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS := --disable-pip-version-check --quiet

.PHONY: help demo test faults versions lint bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(STAMP) ## train a small GPT on two CPU ranks and write a report (about a minute)
	$(BIN)/lockstep run --nproc 2 examples/train_gpt.py

# Four files at a time: most tests are ranks that wait for each other. A file stays together, for its fixtures.
test: $(STAMP) ## run the whole test suite
	$(BIN)/python -m pytest -n 4 --dist loadfile

faults: $(STAMP) ## run the soaks: faults at more moments, modes in more mixes than make test tries (an hour)
	$(BIN)/python -m pytest -m soak

versions: ## run the tests on each supported torch (PYTEST='tests/plan' for a part)
	PYTHON=$(PYTHON) tools/torch_versions.sh $(PYTEST)

lint: $(STAMP) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## measure against torch's DistributedDataParallel and an earlier version
	$(BIN)/python benchmarks/run.py

clean: ## remove what the other targets made, except .venv
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first and by its pin, so that nothing installed after it can choose another build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) torch -c constraints.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev,integrations]' -c constraints.txt
	touch $@
