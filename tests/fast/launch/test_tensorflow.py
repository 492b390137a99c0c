"""The launcher for TensorFlow, and ``from_tf_config``: what of them is ours is tested without TensorFlow."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from det_core._environments import detect_launcher
from det_core.core import DistributedContext
from det_core.errors import MissingExtra
from support.launcher import launched, write
from support.processes import free_port

TENSORFLOW = [sys.executable, "-m", "det_core.launch.tensorflow"]
WHO = """
    import json, os
    from det_core import core
    distributed, strategy = core.DistributedContext.from_tf_config()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        d = ctx.distributed
        place = [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size]
        print("told", json.dumps(d.allgather([place, os.environ.get("TF_CONFIG")])), strategy)
"""
SECRET = "a secret of two machines"
WAITS = """
    import os, signal, sys, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    if os.fork() == 0:
        time.sleep(600)
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    print("got", len(got))
"""


def config(**changes: Any) -> str:
    cluster = {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}, **changes})


def test_variables_of_two_nodes_name_each_other(tmp_path: Path) -> None:
    write(tmp_path, "who.py", WHO)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    hosts, port, meet = "127.0.0.1,127.0.0.2", free_port(), ["--launcher-port", str(free_port())]
    with ExitStack() as stack:
        jobs = []
        for node in range(2):
            words = ["--hosts", hosts, "--node-rank", str(node), "--port", str(port + 100 * node), *meet, "who.py"]
            secret = ("DET_CORE_SECRET", SECRET) if node == 0 else ("DET_CORE_SECRET_FILE", str(tmp_path / "secret"))
            env = dict([secret], INTER_TRAIN_PROCESS_COMM_PORT_1=str(port))
            jobs.append(stack.enter_context(launched(TENSORFLOW, *words, folder=tmp_path, **env)))
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    for node, job in enumerate(jobs):
        prefix, told = re.findall(r"^(\[rank=\d\]) told (.*) None$", job.out, re.MULTILINE)[0]
        assert prefix == f"[rank={node}]"
        ranks = json.loads(told)
        assert [place for place, _ in ranks] == [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]]
        workers = [f"127.0.0.{n}:{port + 100 * node}" for n in (1, 2)]
        assert json.loads(ranks[node][1]) == {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": node},
        }
        said = [line for line in job.err.splitlines() if line.startswith("[launcher]")]
        assert said == ([] if node else ["[launcher] linked with 1 other node"])


def test_variables_of_one_node_have_no_cluster(tmp_path: Path) -> None:
    write(tmp_path, "who.py", WHO)
    with launched(TENSORFLOW, "who.py", folder=tmp_path, TF_CONFIG=config()) as job:
        assert job.wait() == 0, job.err
    assert "[rank=0] told [[[0, 1, 0, 1, 0, 1], null]] None\n" in job.out
    assert "no GPU" not in job.err, "it is one process, GPU or not"


def test_signal_reaches_the_script_once_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path, "waits.py", WAITS)
    with launched(TENSORFLOW, "waits.py", folder=tmp_path) as job:
        job.wait_for("ready")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0, job.err
        job.nothing_left()
    assert "[rank=0] got 1\n" in job.out
    assert job.err == "[launcher] SIGTERM forwarded to 1 rank; grace period 60 s\n"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return monkeypatch


def test_from_tf_config_with_one_worker_or_none_is_one_rank(variables: pytest.MonkeyPatch) -> None:
    for text in ("", config(cluster={"worker": ["h:1"]}, task={"type": "worker", "index": 0})):
        variables.setenv("TF_CONFIG", text)
        context, strategy = DistributedContext.from_tf_config()
        assert (context.rank, context.size, strategy) == (0, 1, None)
        context.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TF_CONFIG='\\[\\]': expected {"),
        (config(task={"type": "ps", "index": 0}), "of type 'ps'"),
        (config(task={"type": "worker", "index": 2}), "with the N of one of the workers"),
        (config(task={"type": "worker"}), "KeyError: 'index'"),
        (config(cluster={"worker": "h:1"}), '\\["HOST:PORT", …\\]'),
        (config(cluster=None), "TypeError"),
    ],
)
def test_from_tf_config_of_a_malformed_variable_raises(variables: pytest.MonkeyPatch, text: str, message: str) -> None:
    variables.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message):
        DistributedContext.from_tf_config()
    assert detect_launcher({"TF_CONFIG": text}) is None, "core.init() without distributed= goes on"


def test_from_tf_config_with_a_strategy_needs_tensorflow(variables: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtra, match="pip install tensorflow"):
        DistributedContext.from_tf_config(strategy=True)


def test_detect_launcher_recognizes_several_workers() -> None:
    found = detect_launcher({"TF_CONFIG": config()})
    assert found is not None and ".from_tf_config(" in found.constructor
    ranks = {"rank": 1, "size": 2, "local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2}
    assert (found.ranks(), found.address()) == (ranks, "10.0.0.1")
