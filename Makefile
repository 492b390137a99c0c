# Two commands do everything on a new machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# How many tests run at a time; 0: one, in pytest's own process.
JOBS ?= 2

.PHONY: help setup demo test test-trainings test-stores test-rgw test-postgres test-launchers test-timm test-long lint docs bench ci system-deps clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed  ## make .venv with det_core (editable) and all that the tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## train the quickstart on two ranks, interrupt it, resume it, show what is kept
	$(PY) examples/quickstart/demo.py

test: setup lint  ## all tests but whole trainings and the slow proofs
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not long and not rgw and not postgres and not frameworks and not timm and not trainings and not stores' $(ARGS)

test-trainings: setup  ## whole trainings: killed and resumed in every way once, on several ranks, and examples
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'trainings and not long and not frameworks' tests $(ARGS)

test-stores: setup  ## object stores by every method and every fault, one call at a time
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'stores and not rgw and not long' tests $(ARGS)

test-rgw: setup  ## the tests against Ceph's S3 server, which `make ci` installs
	$(PY) -m pytest -m 'rgw and not long' $(ARGS)

test-postgres: setup  ## the master's store in PostgreSQL, which `make ci` installs
	$(PY) -m pytest -m 'postgres and not long' tests/master $(ARGS)

# The venv of the frameworks: torch, horovod, deepspeed. What has to be compiled is kept in the user's cache.
FRAMEWORKS := $(CURDIR)/.venvs/frameworks

test-launchers: setup  ## the launchers around torchrun, horovodrun, deepspeed, mpirun and Slurm, also on two machines
	tests/support/frameworks.sh $(FRAMEWORKS)
	FRAMEWORKS_VENV=$(FRAMEWORKS) $(PY) -m pytest -n $(JOBS) --dist worksteal -m 'frameworks and not long' tests $(ARGS)

# The venv of examples/timm_port: torch, timm, a torchvision that works without CUDA.
TIMM := $(CURDIR)/.venvs/timm

test-timm:  ## the port of timm's training in five steps, as experiments too; timm in the accelerated Trainer
	tests/support/timm.sh $(TIMM)
	$(TIMM)/bin/python -m pytest -m 'timm and not long' tests/examples/test_timm_port.py tests/accelerated/test_timm.py $(ARGS)

test-long: setup  ## the slow proofs: random kills by the hundred, soak
	FRAMEWORKS_VENV=$(FRAMEWORKS) $(PY) -m pytest -m long --timeout 3600 $(ARGS)

lint: setup  ## ruff and mypy
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

docs: setup  ## write docs/cli.md from the commands themselves, docs/experiment.md from the models
	$(PY) docs/cli_reference.py > docs/cli.md
	$(PY) docs/experiment_reference.py > docs/experiment.md

bench: setup  ## every benchmark, ours beside the peers (peers in venvs of their own)
	$(PY) -m benchmarks $(ARGS)

system-deps:  ## the system packages CI needs (the only target that uses apt)
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  command -v git >/dev/null && $(PYTHON) -c 'import venv, ensurepip' || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends git python3-venv; }; \
	  (for tool in radosgw ceph-osd ceph-mon ceph-authtool zsh fish; do command -v $$tool >/dev/null || exit 1; done) || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw zsh fish; }; \
	  ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends postgresql-15; }; \
	  (for tool in mpirun slurmctld munged ip sshd pdsh cmake g++; do command -v $$tool >/dev/null || exit 1; done) || \
	  { apt-get update -qq && apt-get install -y --no-install-recommends \
	    openmpi-bin slurm-wlm munge iproute2 openssh-server pdsh cmake g++ make python3-dev; }; fi

ci: export CI := 1
ci: system-deps test test-trainings test-stores test-rgw test-postgres test-launchers test-timm  ## what .ci/run calls

clean:  ## remove what the targets above made
	rm -rf $(VENV) .venvs build dist *.egg-info demo-home
