"""Runs whose output nobody reads any more: what det_core says fails none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from det_core import client

FINISHES = """
import os, sys
from det_core import core
with core.init(name="unread", retention=core.KeepBest(1, "no_such_metric")) as ctx:
    if sys.__stderr__ is None:
        os.write(2, b"what a library of C says")
    for step in range(1, 5):
        ctx.train.report_training_metrics(step, {"loss": 1.0})
        with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "file").write_text("x")
        ctx.alert("an alert")
        assert not ctx.preempt.should_preempt()
print("done")
"""
STOPS = """
import sys, time
from det_core import core
with core.init(name="unread") as ctx:
    step = 0
    while True:
        step += 1
        ctx.train.report_training_metrics(step, {"loss": 1.0})
        if ctx.preempt.should_preempt():
            break
        if step == 1:
            print("trains", flush=True)
        time.sleep(0.001)
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "file").write_text("x")
"""


@pytest.mark.parametrize("stderr", ["unread pipe", "full disk", "closed"])
def test_run_without_a_reader_of_stderr_completes(stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FINISHES)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what a buffer holds is written again at exit
    command = [sys.executable, str(script)]
    if stderr == "unread pipe":
        read, to = os.pipe()
        os.close(read)
    else:
        to = os.open("/dev/full", os.O_WRONLY)
    if stderr == "closed":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=to, text=True)
    os.close(to)
    assert (done.returncode, done.stdout) == (0, "done\n")
    run = client.run("latest")
    assert (run.state, run.record.torn_lines) == ("completed", 0)
    assert [row.steps_completed for row in run.rows("training")] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_after_the_reader_died_still_saves(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``python fit.py 2>&1 | tee log``, where Ctrl-C ends tee as well."""
    script = tmp_path / "fit.py"
    script.write_text(STOPS)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as fit:
        assert fit.stdout is not None
        while fit.stdout.readline() != b"trains\n":
            assert fit.poll() is None
        fit.stdout.close()
        fit.send_signal(number)
        assert fit.wait() == 0
    run = client.run("latest")
    assert run.state == "preempted"
    assert len(run.checkpoints()) == 1
