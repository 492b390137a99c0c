"""A script on a file system of 4 MB that is full for a while: it trains on, and its record is whole in the end.

Everything goes through the public face: the script's calls, ``det-core runs show`` and ``det-core checkpoint verify``.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.disks import fill, small_disk

STEPS = 300
SCRIPT = """
import sys
from det_core import core
from det_core.errors import CheckpointError

mode, background, source = core.TensorboardMode[sys.argv[1]], sys.argv[2] == "background", sys.argv[3]
refused = []
with core.init(name="small", tensorboard_mode=mode) as ctx:
    for step in range(1, 301):
        if step in (101, 201):
            print("before", step, flush=True)
            input()
        ctx.train.report_training_metrics(step, {"loss": 1 / step})
        how = {"blocking": not background or step % 100 == 0}  # nothing is under way while it waits
        try:
            if step % 20 == 0:  # det_core copies the script's file
                ctx.checkpoint.upload(source, {"steps_completed": step}, **how)
            elif step % 20 == 10:  # the script's own file needs no room: those that det_core adds do
                with ctx.checkpoint.store_path({"steps_completed": step}, **how) as (path, _):
                    (path / "mark").touch()
        except CheckpointError as e:
            assert "No space left on device" in str(e), e
            refused.append(step)
    print("trained; refused:", *refused, flush=True)
"""
FULL = "No space left on device|the disk took only part of a line"


class Script:
    """The script while it runs; it waits before the steps 101 and 201."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        source = folder / "source"
        source.mkdir()
        (source / "model").write_bytes(bytes(100_000))
        self._said = folder / "stderr"
        with self._said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *arguments, str(source)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip

    def trains_to(self, step: int) -> None:
        """Return when it waits before a step."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"before {step}\n", self.said()

    def goes_on(self) -> None:
        """Let it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> tuple[int, list[int]]:
        """Its status, and the steps whose checkpoints it was refused."""
        out, _ = self.process.communicate()
        assert out.startswith("trained; refused:"), (out, self.said())
        return self.process.returncode, [int(step) for step in out.split(":")[1].split()]

    def said(self) -> str:
        """Return the text that it wrote to stderr."""
        return self._said.read_text()


@contextlib.contextmanager
def script_on(disk: Path, *arguments: str) -> Iterator[Script]:
    """Run the script; kill it when the block ends, if it still runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_CORE_HOME", str(disk / "home"))
        script = Script(disk.parent, *arguments)
        try:
            yield script
        finally:
            script.process.kill()
            script.process.communicate()


def det_core(*words: str) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "det_core.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def shown() -> dict[str, Any]:
    """Return the script's run from ``det-core runs show``."""
    found: dict[str, Any] = json.loads(det_core("runs", "show", "latest", "--json"))
    return found


def rows() -> list[int]:
    """Return the steps in the record, in its order."""
    lines = det_core("runs", "export", "latest", "--format", "jsonl").splitlines()
    return [json.loads(line)["steps_completed"] for line in lines]


def drawn(folder: Path) -> list[int]:
    """Return the steps of the loss in TensorBoard."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("training/loss")]


def saved(run: dict[str, Any]) -> list[int]:
    return [checkpoint["steps_completed"] for checkpoint in run["checkpoints"]]


@pytest.mark.parametrize(
    ("mode", "how", "told"),
    [
        ("AUTO", "blocking", range(110, 201, 10)),
        ("MANUAL", "background", range(120, 201, 20)),  # what fails in the background, the next call tells
    ],
)
def test_disk_full_for_a_while_loses_no_report(tmp_path: Path, mode: str, how: str, told: range) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk, script_on(disk, mode, how) as script:
        script.trains_to(101)
        filler = fill(disk)
        before = shown()
        script.goes_on()
        script.trains_to(201)
        full = shown()
        filler.unlink()
        script.goes_on()
        status, refused = script.ends()
        after = shown()
        assert before["state"] == full["state"] == "running"
        assert before["groups"]["training"]["rows"] == 100 <= full["groups"]["training"]["rows"] < 200
        assert saved(before) == saved(full) == [*range(10, 101, 10)]
        assert after["state"] == "completed"
        assert rows() == [*range(1, STEPS + 1)]
        assert saved(after) == [*range(10, 101, 10), *range(210, 301, 10)] and refused == [*told]
        det_core("checkpoint", "verify", "--all")
        assert len(re.findall(rf"cannot write the journal in .* \(({FULL})\)", script.said())) == 1
        assert status == 0
        if mode == "AUTO":
            assert drawn(Path(after["path"], "tensorboard", "rank-0")) == [*range(1, STEPS + 1)]


def test_disk_full_until_the_end_makes_run_incomplete(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk, script_on(disk, "MANUAL", "blocking") as script:
        script.trains_to(101)
        fill(disk)
        script.goes_on()
        script.trains_to(201)
        script.goes_on()
        status, refused = script.ends()
        kept = rows()
        (lost,) = re.findall(rf"ReportsLost: lost (\d+) report\(s\): cannot write to .*: ({FULL})", script.said())
        assert status == 1 and refused == [*range(110, 301, 10)]
        assert kept == [*range(1, len(kept) + 1)] and len(kept) >= 100
        assert len(kept) + int(lost[0]) == STEPS, "all but rows is kept in the room that was reserved"
        assert shown()["state"] == "incomplete"
        assert re.search(r"det_core: run \S+ incomplete \(lost \d+ report\(s\): cannot write", script.said())
        assert saved(shown()) == [*range(10, 101, 10)]
        det_core("checkpoint", "verify", "--all")
