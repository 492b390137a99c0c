"""A launcher on each of three machines, and every fault that keeps one of them from joining, or takes it away."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frameworks import need
from support.hosts import Hosts, three_hosts
from support.launcher import short_form
from support.processes import until

__all__ = ["three_hosts"]
short = short_form("test_three_machines")
ALL = (0, 1, 2)
NO_ANSWER = r"node 0's launcher does not answer at \S+:29501; the job ends if that is so after 12 s"
NOT_COME = r"not linked yet: node 2 \(node3\); they connect to node1:29501"
LATE = r"node 2 \(node3\) did not link within 12 s: the job ends here too"


@pytest.fixture(autouse=True)
def nothing_is_left(three_hosts: Hosts) -> Iterator[None]:
    """Check after each test that only servers run on any node."""
    need()
    yield
    three_hosts.nothing_left()


@pytest.mark.parametrize(("of", "machine"), [("torch", 0), ("torch", 1), ("torch", 2), ("horovod", 0)])
def test_script_missing_on_one_node_ends_all(three_hosts: Hosts, tmp_path: Path, of: str, machine: int) -> None:
    """Also if the ranks of other nodes wait for node 0, as horovod's do."""
    job = short.end_of_fault(three_hosts, tmp_path, machine, {"script": "nowhere.py", "of": of}, [])
    assert statuses(job) == [2, 2, 2]
    for number in ALL:
        job.first(number, rf"node {machine} \(node{machine + 1}\) could not start: the script nowhere.py does not")


@pytest.mark.parametrize("of", ["torch", "horovod"])
def test_master_port_in_use_ends_all(three_hosts: Hosts, tmp_path: Path, of: str) -> None:
    listens = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(3600)"
    server = three_hosts.serve(1, sys.executable, "-c", listens)
    until(lambda: 29500 in three_hosts.listening(1), of=server)
    try:
        job = short.end_of_fault(three_hosts, tmp_path, 0, {"of": of}, [])
    finally:
        server.kill()
        server.wait()
    assert statuses(job) == [1, 1, 1]
    for number in ALL:
        job.first(number, r"node 0 \(node1\) could not start: port 29500 is in use")


@pytest.mark.parametrize("machine", ALL)
def test_framework_missing_on_one_node_ends_all(three_hosts: Hosts, tmp_path: Path, machine: int) -> None:
    changes = {"of": "horovod", "python": sys.executable}
    job = short.end_of_fault(three_hosts, tmp_path, machine, changes, [])
    assert statuses(job) == [1, 1, 1]
    for number in ALL:
        job.first(number, rf"node {machine} \(node{machine + 1}\) could not start: this launcher needs horovod")


def test_wrong_secret_is_named_on_both_sides(three_hosts: Hosts, tmp_path: Path) -> None:
    job = short.end_of_fault(three_hosts, tmp_path, 2, {"secret": "the secret of another job"}, [])
    assert statuses(job) == [1, 1, 1]
    job.first(2, r"node 0 \(node1\) has another DET_CORE_SECRET: set the same on each node")
    job.first(0, r"a launcher at \S*10.77.0.3 has another DET_CORE_SECRET: set the same on each node")
    assert job.ended[2] < 10 < job.first(0, NOT_COME)
    others_end_at_the_deadline(job)


@pytest.mark.parametrize("address", ["node2", "localhost", "10.77.0.99"])
def test_foreign_master_addr_is_named_on_both_sides(three_hosts: Hosts, tmp_path: Path, address: str) -> None:
    options = ["--master-addr", address, "--link-timeout", "12"]
    job = short.end_of_fault(three_hosts, tmp_path, 2, {}, options)
    assert statuses(job) == [1, 1, 1]
    job.first(2, NO_ANSWER if address != "10.77.0.99" else f"cannot reach host {address} from node3")
    job.first(0, NOT_COME)
    others_end_at_the_deadline(job)


def test_hosts_in_another_order_on_one_node_are_named(three_hosts: Hosts, tmp_path: Path) -> None:
    job = short.end_of_fault(
        three_hosts, tmp_path, 2, {}, ["--hosts", "node1:1,node3:1,node2:1", "--link-timeout", "12"]
    )
    assert statuses(job) == [1, 1, 1]
    refused = min(job.ended, key=job.ended.__getitem__)  # the later of the two launchers that claim node 1
    for number in (0, refused):
        job.first(number, rf"node 1 \(node{refused + 1}\) cannot join, as another launcher is node 1: ")
    assert job.ended[refused] < 10
    job.first(0, NOT_COME)
    others_end_at_the_deadline(job, refused)


@pytest.mark.parametrize("machine", ALL)
def test_unplugged_node_is_named_first(three_hosts: Hosts, tmp_path: Path, machine: int) -> None:
    short.end_of_unplugged(three_hosts, tmp_path, machine)


def statuses(job: short.Job) -> list[int]:
    """Return the exit status of each node's launcher."""
    return [launcher.process.returncode for launcher in job.launchers]


def others_end_at_the_deadline(job: short.Job, excluded: int = 2) -> None:
    """Check that all but one have waited for node 2 for ``--link-timeout``."""
    for number in {*ALL} - {excluded}:
        assert job.first(number, LATE) >= 11
        assert job.ended[number] < 20, job.words()
    assert not re.search("Traceback|asyncio", job.words())
