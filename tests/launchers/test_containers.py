"""Launchers in two containers of a master of the wire contract's kind: one in each, for the ranks of that one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.frameworks import FRAMEWORKS, everyone_is_right, variables
from support.hosts import ADDRESSES, SECRET, Hosts
from support.launcher import launched, write

SCRIPT = """
    import json, socket
    from det_core import core
    from det_core._env import Environment
    {context}
    with distributed as d:  # without core.init(), which needs a master here
        place = [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size]
        told = d.allgather([place, socket.gethostname(), Environment.read().secret])
    print("told", json.dumps(told))
"""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_launcher_in_each_container_starts_its_own_ranks(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    script = write(tmp_path, "script.py", SCRIPT.format(context=framework.context))
    with ExitStack() as stack:
        jobs = []
        for rank in (1, 0):  # in whatever order
            env = {
                **variables(), "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0", "DET_SESSION_TOKEN": SECRET,
                "DET_CORE_INFO_DIR": str(info_of(tmp_path / f"info{rank}", rank)),
            }  # fmt: skip
            command = [*hosts.on(rank + 1), *framework.launcher()]
            jobs.append(stack.enter_context(launched(command, script, folder=tmp_path, **env)))
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    everyone_is_right(jobs[0].out + jobs[1].out)
    hosts.nothing_left()


def info_of(folder: Path, rank: int) -> Path:
    """Write a container's info files, and return their folder."""
    cluster = {
        "master_url": f"http://{ADDRESSES[0]}:8080", "cluster_id": "c", "agent_id": "a", "slot_ids": [0, 1],
        "task_id": "1", "allocation_id": "1.1", "session_token": SECRET, "task_type": "TRIAL",
        "master_cert_name": None, "master_cert_file": None, "latest_checkpoint": None,
    }  # fmt: skip
    trial = {
        "trial_id": 1, "experiment_id": 1, "trial_seed": 1, "hparams": {}, "config": {}, "steps_completed": 0,
        "trial_run_id": 1, "debug": False, "inter_node_network_interface": "eth0",
    }  # fmt: skip
    rendezvous = {"container_addrs": list(ADDRESSES), "container_rank": rank, "container_slot_counts": [2, 2]}
    folder.mkdir()
    for name, content in {"cluster": cluster, "trial": trial, "rendezvous": rendezvous}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
