"""The quickstart as a new user meets it: the demo, and what interruptions and kill -9 leave."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.journal import RunFolder
from det_core.storage import DirectoryStore
from support import EXAMPLES, warm
from support.processes import Process, until
from support.ranks import watched

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

TRAIN, DEMO = (EXAMPLES / "quickstart" / name for name in ("train.py", "demo.py"))
LAUNCHER = [sys.executable, "-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2"]
FAST = ["--width", "8"]


def test_the_demo_trains_is_interrupted_and_resumes(tmp_path: Path) -> None:
    home = tmp_path / "demo-home"
    earlier = [RunFolder.create(home, name=name).run_id for name in (str(TRAIN), "mine")]
    command = [sys.executable, str(DEMO), "--epochs", "8", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("360 steps, each exactly once", "SIGTERM sent", "validation accuracy", "det-core runs show"):
        assert text in done.stdout
    assert {run.run_id for run in client.runs(home)} & set(earlier) == {earlier[1]}
    (run,) = [run for run in client.runs(home) if run.run_id not in earlier]
    assert run.state == "completed" and run.restarts == 1
    assert [row.steps_completed for row in run.rows("training")] == list(range(1, 361))
    assert str(run.path) in done.stdout


def test_a_resumed_training_goes_on_exactly(tmp_path: Path) -> None:
    """Interrupted and resumed, or not interrupted: the same losses and accuracies."""
    rows: list[list[Any]] = []
    for name, signals in (("whole", False), ("resumed", True)):
        home = tmp_path / name
        environment = {**os.environ, "DET_CORE_HOME": str(home), "DET_CORE_RESUME": "latest"}
        for at in ["epoch 2/", None] if signals else [None]:
            watched([TRAIN, *FAST, "--epochs", "5"], env=environment, at=at)
        run = client.run("latest", home)
        assert run.restarts == signals
        rows.append([(row.group, row.steps_completed, row.metrics) for row in run.rows()])
    assert rows[0] == rows[1] and len(rows[0]) == 5 * 45 + 5


WITNESS = '''
"""Runs the quickstart, and writes down each call that has returned, so that it survives kill -9."""
import contextlib, json, os, runpy, sys, time
from det_core import core

log = os.open(f"{sys.argv[1]}/{time.time_ns()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)

def note(*what):
    os.write(log, (json.dumps(what) + "\\n").encode())

def noted(group, report):
    def method(self, steps_completed, metrics):
        report(self, steps_completed, metrics)
        note(group, steps_completed, metrics)
    return method

store_path = core.CheckpointContext.store_path

@contextlib.contextmanager
def noted_store_path(self, metadata=None, **more):
    with store_path(self, metadata, **more) as (path, storage_id):
        yield path, storage_id
    note("checkpoint", metadata["steps_completed"], storage_id)

core.TrainContext.report_training_metrics = noted("training", core.TrainContext.report_training_metrics)
core.TrainContext.report_validation_metrics = noted("validation", core.TrainContext.report_validation_metrics)
core.CheckpointContext.store_path = noted_store_path
note("pid", int(os.environ.get("RANK", 0)), os.getpid())
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
'''


class Witnessed:
    """The quickstart under witness, in a home of its own.

    Args:
        folder: where all of it goes.
        ranks: how many processes.
        epochs: how long to train in all.
    """

    def __init__(self, folder: Path, ranks: int, epochs: int) -> None:
        self.home = folder / "home"
        self.notes = folder / "notes"
        self.notes.mkdir()
        script = folder / "witness.py"
        script.write_text(WITNESS)
        self.ranks = ranks
        self.words = [script, self.notes, TRAIN, *FAST, "--epochs", epochs]
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DET_CORE_HOME": str(self.home),
            "DET_CORE_RESUME": "latest",
        }

    def noted(self) -> list[list[Any]]:
        """Return the notes in the order of the processes' starts.

        Each process has a file. Its last line may be half there, as a write over the end of a page is seen, and cut by
        a kill, in two parts.
        """
        files = sorted(self.notes.iterdir())
        return [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]

    def start(self) -> Process:
        """Start it: one process warm, two by our launcher."""
        with open(self.notes.with_name("output"), "ab") as output:
            if self.ranks == 1:
                return warm.start(self.words, env=self.environment, stdout=output.fileno())
            command = [*LAUNCHER, *map(str, self.words)]
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    def run_until_killed(self, reports: int, delay: float, rank: int) -> None:
        """Start it, and kill -9 one rank some time after so many reports were made in this start."""
        before = len(self.noted())
        job = self.start()

        def pid() -> int:
            new = self.noted()[before:]
            pids = [note[2] for note in new if note[:2] == ["pid", rank]]
            return pids[0] if pids and sum(kind != "pid" for kind, *_ in new) >= reports else 0

        found = until(pid, self.notes.with_name("output").read_text, of=job)
        time.sleep(delay)
        assert job.poll() is None, "ended before it was killed"
        os.kill(found, signal.SIGKILL)
        assert job.wait() != 0

    def run_to_the_end(self) -> None:
        """Start it, and let it come to its end."""
        assert self.start().wait() == 0, self.notes.with_name("output").read_text()

    def exported(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the rows of ``det-core runs export``, the superseded ones included."""
        command = [str(Path(sys.executable).parent / "det-core"), "runs", "export", "latest", "--format", "jsonl"]
        done = subprocess.run(
            [*command, "--superseded"], env=self.environment, capture_output=True, text=True, check=True
        )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return [(row["group"], row["steps_completed"], row["metrics"]) for row in rows]

    def check(self) -> None:
        """Check that every report that had returned is there, and that every checkpoint that is listed is intact."""
        exported = self.exported()
        noted = self.noted()
        for group, steps, metrics in (n for n in noted if n[0] in ("training", "validation")):
            assert (group, steps, metrics) in exported
        run = client.run("latest", self.home)
        listed = {c["storage_id"]: c["steps_completed"] for c in run.checkpoints()}
        store = DirectoryStore(run.path / "checkpoints")
        stored = {h.storage_id: h.steps_completed for h in store.list(run.run_id)}
        returned = {storage_id: steps for kind, steps, storage_id in noted if kind == "checkpoint"}
        assert returned.items() <= listed.items() <= stored.items()
        for storage_id, steps in stored.items():
            checkpoint = store.open(storage_id)
            checkpoint.check(list(checkpoint.manifest.files))
            assert torch.load(checkpoint.path / "state.pt")["step"] == steps


def kill_again_and_again(witnessed: Witnessed, kills: int, chance: random.Random) -> None:
    for _ in range(kills):
        rank = chance.randrange(witnessed.ranks)
        witnessed.run_until_killed(chance.randrange(1, 140), chance.uniform(0, 0.05), rank)
        witnessed.check()
    witnessed.run_to_the_end()
    witnessed.check()
    run = client.run("latest", witnessed.home)
    steps = [row.steps_completed for row in run.rows("training")]
    assert run.state == "completed" and run.restarts == kills
    assert steps == list(range(1, len(steps) + 1))


def test_what_was_reported_and_stored_survives_kill_9_at_two_random_moments(tmp_path: Path) -> None:
    kill_again_and_again(Witnessed(tmp_path, ranks=1, epochs=8), 2, random.Random(1))
