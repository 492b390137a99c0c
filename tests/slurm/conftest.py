"""A Slurm with a partition whose jobs preempt those of another, for the tests of chains of jobs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chains import Cluster
from support.hosts import Hosts, hosts, skip_or_fail
from support.slurm import Slurm, missing

__all__ = ["hosts"]

PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=8
PartitionName=login Nodes=ALL State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture(scope="session")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    """Start a cluster for all tests, in a directory that every user may enter."""
    if reason := missing():
        skip_or_fail(reason)
    folder = Path(tempfile.mkdtemp(prefix="det-core-slurm-"))
    folder.chmod(0o755)
    running = Slurm(hosts, folder, scheduler="backfill", kill_wait=10, more=PREEMPTION)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(slurm: Slurm) -> Iterator[Cluster]:
    """Yield the cluster with a home directory of the test's own; afterwards nothing is queued and nothing runs."""
    folder = Path(tempfile.mkdtemp(prefix="det-core-chain-"))
    folder.chmod(0o755)
    yield Cluster(slurm, folder)
    slurm.cancel()
    slurm.hosts.nothing_left()
    slurm.wait_for_nodes()
    shutil.rmtree(folder, ignore_errors=True)
