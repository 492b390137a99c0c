"""The horovod launcher's command line, as far as it goes without horovod."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from det_core.launch import _await_host, horovod
from det_core.launch._hosts import Host, Layout
from support.launcher import launched, write
from support.processes import until

HOROVOD = [sys.executable, "-m", "det_core.launch.horovod"]
WITHOUT = pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="horovod is installed here")
CLUSTER = {
    "master_url": "http://master:8080/", "cluster_id": "c1", "agent_id": "a", "slot_ids": [0, 1], "task_id": "1",
    "allocation_id": "1.1", "session_token": "secret", "task_type": "TRIAL", "master_cert_name": None,
    "master_cert_file": "noverify", "latest_checkpoint": None,
}  # fmt: skip
TRIAL = {
    "trial_id": 5, "experiment_id": 7, "trial_seed": 42, "hparams": {}, "steps_completed": 3, "trial_run_id": 2,
    "debug": False, "inter_node_network_interface": "eth1",
}  # fmt: skip


@WITHOUT
def test_launcher_without_horovod_shows_the_install_command(tmp_path: Path) -> None:
    write(tmp_path, "ok.py", "print('ran')")
    with launched(HOROVOD, "-np", "2", "ok.py", folder=tmp_path) as job:
        assert job.wait() == 1
    assert job.err.startswith("[launcher] this launcher needs horovod") and job.err.count("\n") == 1, job.err


@WITHOUT
@pytest.mark.parametrize("words", [["--autohorovod", "-np", "1"], ["--autohorovod"]])
def test_autohorovod_with_one_slot_runs_the_script_alone(tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, "says.py", "import os, sys; print(*sys.argv, 'USE_HOROVOD' in os.environ); sys.exit(4)")
    with launched(HOROVOD, *words, "says.py", "--", "-x", folder=tmp_path) as job:
        assert job.wait() == 4
    assert (job.out, job.err) == ("says.py -- -x False\n", "")


@WITHOUT
def test_autohorovod_with_more_slots_needs_horovod(tmp_path: Path) -> None:
    write(tmp_path, "ok.py", "print('ran')")
    with launched(HOROVOD, "--autohorovod", "-np", "2", "ok.py", folder=tmp_path) as job:
        assert job.wait() == 1
    assert "needs horovod" in job.err


PLACE = Layout("a test", (Host("127.0.0.1", 1), Host("h", 1)))


@pytest.fixture
def rendezvous() -> Iterator[socket.socket]:
    """Yield a socket with a port, which does not listen yet."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def awaiting(server: socket.socket, *script: str) -> list[str]:
    """Return the command of a rank of the second node."""
    layout = replace(PLACE, node_rank=1, port=server.getsockname()[1])
    return horovod.command(layout, list(script))


def test_command_on_another_node_waits_for_the_rendezvous(rendezvous: socket.socket) -> None:
    rendezvous.listen()
    command = awaiting(rendezvous, "sh", "-c", "kill -PIPE $$; echo survived")
    assert subprocess.run(command).returncode == -signal.SIGPIPE, "as without the wait"
    assert horovod.command(PLACE, ["the", "script"]) == ["the", "script"], "node 0's ranks do not wait"


def test_wait_prints_a_notice_and_ends_with_the_answer(
    rendezvous: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_await_host, "NOTICE_DELAY", 0.0)
    host, port = rendezvous.getsockname()
    waiting = threading.Thread(target=_await_host.wait, args=(host, port, 3600.0))
    waiting.start()
    notice = f"waiting for node 0's launcher at {host}:{port}: Connection refused\n"
    until(lambda: notice in capsys.readouterr().err)
    rendezvous.listen()
    waiting.join()


def test_wait_without_an_answer_names_the_address(rendezvous: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "_START_TIMEOUT", 0.5)
    done = subprocess.run(awaiting(rendezvous, "true"), capture_output=True, text=True)
    where = f"127.0.0.1:{rendezvous.getsockname()[1]}"
    assert done.returncode == 1
    assert done.stderr == f"node 0's launcher did not answer at {where} within 0.5 s: Connection refused\n"


@pytest.mark.parametrize(
    ("optimizations", "options"),
    [
        ({}, ["--fusion-threshold-mb", "64", "--cycle-time-ms", "1"]),
        (
            {"tensor_fusion_threshold": 32, "tensor_fusion_cycle_time": 5},
            ["--fusion-threshold-mb", "32", "--cycle-time-ms", "5"],
        ),
        ({"auto_tune_tensor_fusion": True}, ["--autotune", "--autotune-log-file", "/tmp/autotune_log.csv"]),
    ],
)
def test_trial_options_follow_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizations: dict[str, object], options: list[str]
) -> None:
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path))
    assert horovod._trial_options() == []
    config = {"optimizations": optimizations, "data": {"__det_dtrain_args": ["--x", 1]}}
    rendezvous = {"container_addrs": ["a", "b"], "container_rank": 0, "container_slot_counts": [2, 2]}
    files = {"cluster": CLUSTER, "trial": {**TRIAL, "config": config}, "rendezvous": rendezvous}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    cache = ["--cache-capacity", "1024", "--no-hierarchical-allreduce", "--no-hierarchical-allgather"]
    assert horovod._trial_options() == [*cache, *options, "--network-interface", "eth1", "--x", "1"]
