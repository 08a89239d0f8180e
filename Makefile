# make train | test | check | docs. Each installs what it needs into .venv, again only when the requirements change.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# box2d has no wheel for Python 3.14: there another task is trained.
HAS_BOX2D := $(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; print("yes" * (sys.version_info < (3, 14)))')
TASK ?= $(if $(HAS_BOX2D),LunarLanderContinuous-v3,CartPole-v1)
REQUIREMENTS := pyproject.toml constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
comma := ,
TRAIN_EXTRAS := $(if $(HAS_BOX2D),box2d$(comma))mujoco,video$(if $(filter envpool/%,$(TASK)),$(comma)envpool)

.DEFAULT_GOAL := help
.PHONY: help train test check format docs clean

help:  ## Say what there is to make.
	@sed -n 's/^\([a-z]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST)

train: $(VENV)/.installed-$(TRAIN_EXTRAS)  ## Train, evaluate and film a policy; TASK=CartPole-v1 trains another, ARGS="--seed 2" sets more.
	@$(BIN)/canter train $(TASK) $(ARGS)

test: $(VENV)/.installed-dev  ## Run the tests.
	@$(PYTEST)

check: $(VENV)/.installed-dev  ## Check format, lint and types, then run the tests.
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/basedpyright
	@$(PYTEST)

format: $(VENV)/.installed-dev  ## Format the code and fix what can be fixed.
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

docs: $(VENV)/.installed-docs  ## Build the documentation into site/.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html"

clean:  ## Remove what was built, but no runs.
	rm -rf $(VENV) site build dist src/*.egg-info .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  (3, 11) <= v < (3, 15) or sys.exit(f"canter needs Python 3.11 to 3.14, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing canter[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch '$@'
