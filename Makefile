# Two commands do everything on a new machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# How many tests run at a time; 0: one, in pytest's own process.
JOBS ?= 3
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal
# Long tests: each to the next worker that is free.
ONE_BY_ONE := --dist load --maxschedchunk 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-trainings test-stores test-postgres test-launchers test-slurm test-timm test-long fmt lint docs picture bench stats ci system-deps clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed  ## make .venv with det_core (editable) and all that the tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing all that the tests need into $(VENV): about 2 GB, some minutes, once."
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The demo's own environment, which has nothing of the tests': det_core, torch, scikit-learn.
DEMO := .venvs/demo

demo: $(DEMO)/.installed  ## train the quickstart on two ranks, interrupt it, resume it, show what is kept
	@echo "Training on two ranks, twice: about half a minute."
	@$(DEMO)/bin/python examples/quickstart/demo.py $(ARGS)

$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo "Installing det_core, torch and scikit-learn into $(DEMO). This is done once, and takes one to five minutes."
	@echo "It is about 1 GB, and several more where pip brings torch for GPUs: README says how to avoid that."
	@test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	@$(DEMO)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[torch,examples]'
	@touch $@

# Half of a test's time it waits: with four at a time, two cores are busy.
test: JOBS = 4
test: setup lint  ## the tests of every room: tests/fast, or what ARGS names (ARGS=tests/fast/journal)
	$(PYTEST) $(ARGS)

test-trainings: setup  ## whole trainings: killed and resumed in every way once, on several ranks, and examples
	$(PYTEST) $(ONE_BY_ONE) tests/trainings $(ARGS)

test-stores: setup  ## object stores by every method and every fault, on moto, the GCS emulator and Ceph's gateway
	$(PYTEST) tests/stores $(ARGS)

test-postgres: setup  ## the master's store in PostgreSQL
	$(PYTEST) tests/postgres $(ARGS)

# The venv of the frameworks: torch, horovod, deepspeed. What has to be compiled is kept in the user's cache.
FRAMEWORKS := $(CURDIR)/.venvs/frameworks

test-launchers: setup  ## the launchers with torch, horovod, deepspeed, mpirun and Slurm, also on two and three machines
	tests/support/frameworks.sh $(FRAMEWORKS)
	FRAMEWORKS_VENV=$(FRAMEWORKS) $(PYTEST) $(ONE_BY_ONE) tests/launchers $(ARGS)

test-slurm: setup  ## chains of jobs on Slurm's daemons: time limits, kills, preemptions; half an hour, or what ARGS names
	$(PY) -m pytest tests/slurm $(ARGS)

# The venv of examples/timm_port, on top of the other one: timm, a torchvision that works without CUDA.
TIMM := $(CURDIR)/.venvs/timm

test-timm: setup  ## the port of timm's training, as its README says; timm in the accelerated Trainer; or what ARGS names
	tests/support/timm.sh $(TIMM) $(VENV)
	$(TIMM)/bin/python -m pytest -n $(JOBS) --dist loadfile $(or $(ARGS),tests/timm)

test-long: setup  ## the slow proofs: random kills by the hundred, soak; or the file that ARGS names
	FRAMEWORKS_VENV=$(FRAMEWORKS) $(PY) -m pytest --timeout 3600 $(or $(ARGS),tests/long)
	$(if $(ARGS),,$(MAKE) test-timm ARGS="--timeout 3600 tests/long/test_trainings_timm.py")

fmt: setup  ## format every file, and mend what ruff can mend
	$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

lint: setup  ## ruff and mypy
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

docs: setup  ## write docs/reference.md from the docstrings, docs/reference-experiment.md from the models
	$(PY) docs/reference.py > docs/reference.md
	$(PY) docs/reference_experiment.py > docs/reference-experiment.md

picture: setup  ## record docs/picture.svg anew: what README's commands print
	PYTHONPATH=tests $(PY) docs/picture.py

bench: setup  ## every benchmark, ours beside the peers (peers in venvs of their own)
	$(PY) -m benchmarks $(ARGS)

stats:  ## lines by room, import circles, CPU seconds of the last test runs (ARGS="--tests 20": the costliest tests)
	@$(PYTHON) tests/support/stats.py $(ARGS)

system-deps:  ## the system packages CI needs (the only target that uses apt and npm)
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  command -v git >/dev/null && $(PYTHON) -c 'import venv, ensurepip' || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends git python3-venv; }; \
	  (for tool in radosgw ceph-osd ceph-mon ceph-authtool zsh fish; do command -v $$tool >/dev/null || exit 1; done) || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw zsh fish; }; \
	  ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends postgresql-15; }; \
	  (for tool in mpirun slurmctld munged ip sshd pdsh cmake g++; do command -v $$tool >/dev/null || exit 1; done) || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends \
	    openmpi-bin slurm-wlm munge iproute2 openssh-server pdsh cmake g++ make python3-dev; }; \
	  command -v azurite-blob >/dev/null || ! command -v npm >/dev/null || \
	  npm install --global --no-audit --no-fund --loglevel=error azurite || \
	  echo 'Azurite cannot be installed: the tests of Azure are skipped'; fi

ci: export CI := 1
ci: system-deps test test-stores test-postgres test-launchers  ## what .ci/run calls
	$(MAKE) test-slurm ARGS="-k test_chain_of_two_jobs"
	$(MAKE) --jobs 2 test-trainings test-timm
	$(MAKE) stats

clean:  ## remove what the targets above made
	rm -rf $(VENV) .venvs build dist *.egg-info demo-home .stats
