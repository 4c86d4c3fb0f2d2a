# Everything a newcomer or a CI job runs. Needs Python 3.11+ and make, nothing else.

PYTHON ?= python3
PYTEST_WORKERS ?= 2

# `test-oldest` overrides these.
VENV := .venv
CONSTRAINTS := constraints.txt
WARNINGS :=
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --quiet install --constraint $(CONSTRAINTS)
WHEELS := build/wheel
SOURCES := $(shell find bert_tasks -type d ! -name __pycache__ -o -name '*.py' -o -name '*.html' -o -name '*.css' -o -name '*.md' -o -name py.typed)

# Stamps, so that a second run installs nothing that has not changed.
TOOLS := $(VENV)/.tools
PACKAGE := $(VENV)/.package
DEPENDENCIES := $(VENV)/.dependencies-

# The tests see the installed wheel only: they run in an empty folder and nothing adds that folder, or the
# repository, to the import path. pytest keeps the rewritten tests as bytecode, which saves each worker ten seconds.
PYTEST := cd build/testrun && env -u PYTHONPATH -u PYTHONDONTWRITEBYTECODE PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 \
	BERT_TASKS_REPOSITORY="$(CURDIR)" "$(BIN)/pytest" -c "$(CURDIR)/pyproject.toml" --rootdir "$(CURDIR)" \
	-n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder "$(CURDIR)/tests" -q --durations=25

# Campaigns run outside pytest, at length, also on the installed wheel.
CAMPAIGN := env PYTHONPATH=tests:campaigns PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	BERT_TASKS_REPOSITORY="$(CURDIR)" "$(BIN)/python" -m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-installed test-oldest test-slow durations gpu engines faults fuzz mutants soak docs site lint clean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: $(DEPENDENCIES)quickstart $(PACKAGE)  ## fine-tune published weights on a small data set and predict
	"$(BIN)/python" recipes/quickstart.py

test: lint test-installed  ## lint, then the tests against the installed wheel

test-installed: $(DEPENDENCIES)dev $(PACKAGE) build/testrun
	$(PYTEST) $(WARNINGS)

# Old libraries call each other in ways that have been deprecated since, so a warning is no error here.
test-oldest:  ## the tests with the oldest versions that the package accepts, in .venv-oldest (7 GB with torch for CUDA)
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt WARNINGS="-W default" test-installed

test-slow: $(DEPENDENCIES)dev $(PACKAGE) build/testrun  ## the tests that take long
	$(PYTEST) -m "slow or gpu"

durations: $(DEPENDENCIES)dev $(PACKAGE) build/testrun  ## all tests, to write how long each file takes: long ones start first
	$(PYTEST) --write-durations
	$(PYTEST) --write-durations -m "slow or gpu"

gpu:  ## the tests on a CUDA device, with the torch and transformers of $(PYTHON); without a device what a CPU can do
	env PYTHONPATH="$(CURDIR)" HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -c pyproject.toml -o minversion=8 -W default -q \
		-p no:cacheprovider -m gpu -rs tests/gpu

engines: $(DEPENDENCIES)dev $(DEPENDENCIES)engines $(PACKAGE) build/testrun  ## the tests and the how-to of Ray Data and Spark (700 MB; Java)
	$(PYTEST) -m "slow and not gpu" -k "batch_engines or how_to/predict"

faults: $(DEPENDENCIES)dev $(PACKAGE)  ## the fault suite at full length; its figures go to campaigns/results
	$(CAMPAIGN) reliability

fuzz: $(DEPENDENCIES)dev $(DEPENDENCIES)fuzz $(PACKAGE)  ## edited files and requests, 9 groups of 7 minutes; figures as above
	$(CAMPAIGN) fuzzing
	$(CAMPAIGN) guided_fuzzing

mutants: $(DEPENDENCIES)dev $(PACKAGE)  ## 200 random faults in the package, against its tests; figures as above
	$(CAMPAIGN) mutants --workers $(PYTEST_WORKERS)

soak: $(DEPENDENCIES)dev $(PACKAGE)  ## good and bad clients on a server, then rolling restarts: make soak MODEL=folder
	$(CAMPAIGN) serve_soak "$(MODEL)"
	$(CAMPAIGN) rolling_restart "$(MODEL)"

docs: $(DEPENDENCIES)dev $(PACKAGE)  ## write the reference of commands and recipe keys, and the schema
	env -u PYTHONPATH HF_HUB_OFFLINE=1 "$(BIN)/python" docs/generate_reference.py

site: $(DEPENDENCIES)docs $(PACKAGE)  ## build the documents as a site in build/site
	env NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

lint: $(DEPENDENCIES)dev  ## ruff (rules and format) and mypy --strict
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy" --strict bert_tasks benchmarks

clean:  ## remove the environments and everything that was built
	rm -rf $(VENV) .venv-oldest build dist .hypothesis .pytest_cache .ruff_cache

build/testrun:
	mkdir -p $@

$(TOOLS): $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x "$(BIN)/python" || $(PYTHON) -m venv $(VENV)
	$(PIP) hatchling
	touch $@

$(PACKAGE): $(SOURCES) pyproject.toml README.md LICENSE $(TOOLS)
	rm -rf $(WHEELS)
	"$(BIN)/python" -m pip --quiet wheel --no-deps --no-build-isolation --wheel-dir $(WHEELS) .
	$(PIP) --force-reinstall --no-deps $(WHEELS)/bert_tasks-*.whl
	touch $@

# The dependencies are read from the wheel's metadata, so what is installed is what the wheel declares.
$(DEPENDENCIES)%: pyproject.toml $(CONSTRAINTS) | $(PACKAGE)
	$(PIP) "$$(echo $(WHEELS)/bert_tasks-*.whl)[$*]"
	touch $@
