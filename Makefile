# titan_rl: `make train` on a fresh clone installs what is missing, then trains. Every target takes ARGS, MODE and VENV.
VENV ?= .venv
MODE ?=
CONFIG ?= configs/quickstart.toml
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help install train test lint

help: ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: ## make the virtual environment (VENV=.venv, MODE=cpu or gpu); at once where it is there
	@scripts/install.sh $(VENV) $(MODE)

train: install ## train as CONFIG=configs/quickstart.toml says; ARGS="--training.steps 20" overrides
	$(BIN)/titan-rl train $(CONFIG) $(ARGS)

test: install ## run the tests; ARGS="-m 'not slow'" leaves out those that spawn actors, ARGS='-m ""' runs all
	$(BIN)/python -m pytest -q -m "not confirms" $(ARGS)

lint: install ## ruff: rules and format
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
