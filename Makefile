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

test: install ## run the tests but those that only confirm; with ARGS="-m 'not slow'" those without actors, -m "" all
	$(if $(ARGS),,$(BIN)/python -m pytest -q -m "not slow and not confirms" -n 2 --dist loadfile)
	$(BIN)/python -m pytest -q -m "$(if $(ARGS),,slow and )not confirms" $(if $(ARGS),,-n 2 --dist loadfile) $(ARGS)

lint: install ## ruff: rules and format
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
