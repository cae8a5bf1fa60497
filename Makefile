# titan_rl: `make train` on a fresh clone installs what is missing, then trains. Every target takes ARGS, MODE and VENV.
VENV ?= .venv
MODE ?=
CONFIG ?= configs/quickstart.toml
ARGS ?=
FUZZ_SECONDS ?= 60
BIN := $(VENV)/bin
# pinned workers, one for each core, and one for tests that wait (tests/support/session/scheduling.py)
WORKERS ?= -n auto
PYTEST := $(BIN)/python -m pytest -q $(WORKERS) --dist loadfile

.PHONY: help install train test fast fuzz nightly lint docs dist

help: ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: ## make the virtual environment (VENV=.venv, MODE=cpu or gpu); at once where it is there
	@scripts/install.sh $(VENV) $(MODE)

train: install ## train as CONFIG=configs/quickstart.toml says; ARGS="--training.steps 20" overrides
	$(BIN)/titan-rl train $(CONFIG) $(ARGS)

test: install ## run the tests, with real actors; ARGS are pytest's
	$(PYTEST) -m "not confirms" $(ARGS)

fast: install ## run the tests that start no actors
	$(PYTEST) -m "not slow and not confirms" $(ARGS)

fuzz: install ## let each fuzzer go on for FUZZ_SECONDS=60, with other examples every time
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) -m fuzz -rP $(ARGS)

nightly: install ## run what only confirms other tests, `titan-rl chaos` and benches
	$(PYTEST) -m confirms $(ARGS)

lint: install ## rules, format and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m basedpyright

docs: install ## build the documentation site into build/docs; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: install ## build the wheel and the sdist into dist/
	$(BIN)/python -m build --no-isolation --outdir dist .
