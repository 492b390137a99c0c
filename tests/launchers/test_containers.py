"""Horovod in two containers of a master of the wire contract's kind: the second serves ssh until it is ended."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

from support.frameworks import FRAMEWORKS, PYTHON, need, places, told, variables
from support.hosts import ADDRESSES, NAMES, Hosts
from support.launcher import launched, write

MASTER = """
    import http.server, sys
    class Master(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with open(sys.argv[1], "a") as file:
                print(self.path, self.headers["Grpc-Metadata-x-allocation-token"], file=file)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
    http.server.HTTPServer(("0.0.0.0", 8080), Master).serve_forever()
"""
SCRIPT = """
    import json, socket
    import horovod.torch as hvd
    from det_core import core
    from det_core._env import Environment
    hvd.init()
    with core.DistributedContext.from_horovod(hvd) as d:
        place = [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size]
        told = d.allgather([place, socket.gethostname(), Environment.read().secret])
    print("told", json.dumps(told))
"""
CONTAINER = (
    "mount -t tmpfs tmpfs /run && mkdir -p /run/determined/ssh /run/sshd && "
    'cp /etc/ssh/sshd_config /run/determined/ssh && exec "$@"'
)
"""A command in a container: its /run is its own, and holds what such a cluster puts there."""


def test_the_second_serves_ssh_and_the_first_starts_all(hosts: Hosts, tmp_path: Path) -> None:
    need()
    framework = FRAMEWORKS["horovod"]
    script = write(tmp_path, "told.py", SCRIPT)
    master = hosts.serve(1, PYTHON, write(tmp_path, "master.py", MASTER), f"{tmp_path}/asked")
    with ExitStack() as stack:
        stack.callback(master.wait)
        stack.callback(master.kill)
        jobs = []
        for rank in (1, 0):
            info = info_of(tmp_path / f"info{rank}", rank)
            env = {**variables(), "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0", "DET_CORE_INFO_DIR": str(info)}
            command = [*hosts.on(rank + 1), "sh", "-c", CONTAINER, "sh", *framework.launcher()]
            ids = {"DET_RESOURCES_ID": f"r{rank}", "DTRAIN_SSH_PORT": "12350", "DET_SESSION_TOKEN": "the token"}
            jobs.append(stack.enter_context(launched(command, script, folder=tmp_path, **env, **ids)))
        server, first = jobs
        assert first.wait() == 0, first.err + server.err
        os.kill(server.pid, signal.SIGTERM)
        server.wait()
    found = told(first.out)
    assert sorted(found) == [0, 1, 2, 3]
    for ranks in found.values():
        assert [rank[:2] for rank in ranks] == places(dict.fromkeys(NAMES, 2))
        assert {rank[2] for rank in ranks} == {"the token"}
    assert (tmp_path / "asked").read_text() == "/api/v1/allocations/1.1/resources/r1/daemon Bearer the token\n"
    hosts.nothing_left()


def info_of(folder: Path, rank: int) -> Path:
    """The files that tell a container of itself."""
    cluster = {
        "master_url": f"http://{ADDRESSES[0]}:8080", "cluster_id": "c", "agent_id": "a", "slot_ids": [0, 1],
        "task_id": "1", "allocation_id": "1.1", "session_token": "the token", "task_type": "TRIAL",
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
