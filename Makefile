# Each target sets up what it needs; the second time that takes no time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test learn starter docs format lint type wheel clean

demo: $(VENV)/.installed  ## train the starter model with PPO on this machine, offline
	$(BIN)/tether train

test: $(VENV)/.installed-dev  ## the whole test suite
	$(BIN)/python -m pytest -m "not learn"

learn: $(VENV)/.installed-dev  ## the demo over three seeds, minutes each; pastes the README's table
	$(BIN)/python scripts/measure_demo.py

starter: $(VENV)/.installed  ## rebuild the starter model and its data from nothing
	$(BIN)/python scripts/build_starter.py

docs: $(VENV)/.installed-dev  ## the config reference and the metrics glossary, from the code
	$(BIN)/python scripts/build_reference.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/codespell

type: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@
