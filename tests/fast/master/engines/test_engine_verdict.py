"""The end of an allocation, by what is left of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._verdict import Files, Seen, verdict
from det_core.master.scheduler import Cause

END = {"status": 0, "signal": None, "started": True, "killed": False, "time": 5.0}
FAILED = {**END, "status": 1}
KILLED = {**END, "status": None, "signal": 9, "killed": True}
VAIN = {"status": None, "signal": None, "started": False, "killed": False}
TIME = Seen(Cause.TIME, "job 812 reached its time limit")
MEMORY = Seen(Cause.MEMORY, "out of memory")
NO_ROOM = Seen(Cause.NOT_STARTED, "no room")
DIED = Seen(Cause.LOST, "its node is down")


@pytest.mark.parametrize(
    ("files", "seen", "asked", "expected", "detail"),
    [
        (Files(END, True), None, False, (0, None, Cause.NONE), "the script exited with status 0"),
        (Files(END, True), None, True, (0, None, Cause.NONE), "the script exited with status 0"),
        (Files({**END, "lost_bytes": 7}), None, False, (0, None, Cause.NONE), "; 7 bytes of its output are lost"),
        (Files({**END, "lost_bytes": "x"}), None, False, (0, None, Cause.NONE), "the script exited with status 0"),
        (Files(END, True), DIED, False, (0, None, Cause.NONE), "the script exited with status 0"),
        (Files(END, True), MEMORY, False, (0, None, Cause.NONE), "status 0: out of memory"),
        (Files(FAILED, True), MEMORY, False, (1, None, Cause.MEMORY), "status 1: out of memory"),
        (Files({**KILLED, "killed": False, "signal": 15}), TIME, False, (None, 15, Cause.TIME), "time limit"),
        (Files(KILLED, True), TIME, True, (None, 9, Cause.CANCELLED), "by the master (SIGKILL): job 812"),
        (Files(KILLED, True), None, True, (None, 9, Cause.CANCELLED), "killed by the master (SIGKILL)"),
        (Files({**KILLED, "killed": False}), None, False, (None, 9, Cause.NONE), "was killed (SIGKILL)"),
        (Files({**KILLED, "signal": 99}), None, True, (None, 99, Cause.CANCELLED), "master (signal 99)"),
        (Files({**END, "status": None, "killed": True}), None, True, (None, None, Cause.CANCELLED), "was stopped"),
        (Files({**END, "status": 127, "error": "cannot run x"}), None, False, (127, None, Cause.NONE), "run x"),
        (Files({**VAIN, "cause": "REFUSED", "error": "no"}), None, False, (None, None, Cause.REFUSED), "no"),
        (Files({**VAIN, "cause": [], "error": "no"}), None, False, (None, None, Cause.NOT_STARTED), "no"),
        (Files(None, True), None, False, (None, None, Cause.LOST), "its supervisor was killed"),
        (Files(None, True), None, True, (None, None, Cause.CANCELLED), "killed by the master"),
        (Files(None, True), DIED, True, (None, None, Cause.CANCELLED), "killed by the master"),
        (Files(None, True), DIED, False, (None, None, Cause.LOST), "its node is down"),
        (Files(None, True), TIME, True, (None, None, Cause.TIME), "time limit"),
        (Files(None, False), None, False, (None, None, Cause.NOT_STARTED), "while it was being launched"),
        (Files(None, False), NO_ROOM, False, (None, None, Cause.NOT_STARTED), "no room"),
        (Files(None, False), NO_ROOM, True, (None, None, Cause.NOT_STARTED), "no room"),
    ],
)  # fmt: skip
def test_verdict_follows_the_files(
    files: Files, seen: Seen | None, asked: bool, expected: tuple[Any, ...], detail: str
) -> None:
    end = verdict(files, seen, asked, 7.0)
    assert (end.status, end.signal, end.cause) == expected
    assert detail in end.detail
    assert end.time == (7.0 if files.exit is None or "time" not in files.exit else 5.0)


@pytest.mark.parametrize(
    "change", [{"status": "0"}, {"status": 1 << 70}, {"signal": -1}, {"time": []}, {"time": 1e300}]
)
def test_exit_that_no_supervisor_wrote_is_no_evidence(change: dict[str, Any]) -> None:
    end = verdict(Files({**END, **change}, True), None, False, 7.0)
    assert (end.status, end.signal, end.cause) == (None, None, Cause.LOST)


@pytest.mark.parametrize("wrong", [None, 7, "x", [], [1], ["a", "b"], [-1, 2], [1, "b"], [1 << 40, 1], [True, 1]])
def test_processes_that_no_supervisor_wrote_are_ignored(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "processes").write_text(json.dumps({"boot": "b", "script": wrong, "supervisor": [12, None]}))
    assert AllocationFolder(tmp_path).processes() == {"boot": "b", "supervisor": [12, None]}
