"""The end of an allocation, by what is left of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._verdict import Files, verdict

END = {"status": 0, "signal": None, "started": True, "killed": False, "lost": False, "time": 5.0}
KILLED = {**END, "status": None, "signal": 9, "killed": True}
LOST = (None, None, False, True, True)


@pytest.mark.parametrize(
    ("files", "seen", "asked", "expected", "detail"),
    [
        (Files(END, True), None, False, (0, None, False, True, False), "the script exited with status 0"),
        (Files(END, True), None, True, (0, None, False, True, False), "the script exited with status 0"),
        (Files(KILLED, True), None, True, (None, 9, True, True, False), "killed by the master (SIGKILL)"),
        (Files({**KILLED, "killed": False}), None, False, (None, 9, False, True, False), "was killed (SIGKILL)"),
        (Files({**KILLED, "signal": 99}), None, True, (None, 99, True, True, False), "master (signal 99)"),
        (Files({**END, "status": None, "killed": True}), None, True, (None, None, True, True, False), "was stopped"),
        (Files({**END, "status": 127, "error": "cannot run x"}), None, False, (127, None, False, True, False), "run x"),
        (Files(None, True), None, False, LOST, "its supervisor was killed"),
        (Files(None, True), None, True, (None, None, True, True, False), "its supervisor was killed"),
        (Files(None, False), None, False, (None, None, False, False, True), "while it was being launched"),
        (Files(None, False), "no room", False, (None, None, False, False, False), "no room"),
        (Files(None, False), "no room", True, (None, None, False, False, False), "no room"),
    ],
)  # fmt: skip
def test_verdict_follows_the_files(
    files: Files, seen: str | None, asked: bool, expected: tuple[Any, ...], detail: str
) -> None:
    end = verdict(files, seen, asked, 7.0)
    assert (end.status, end.signal, end.killed, end.started, end.lost) == expected
    assert detail in end.detail
    assert end.time == (7.0 if files.exit is None else 5.0)


@pytest.mark.parametrize(
    "change", [{"status": "0"}, {"status": 1 << 70}, {"signal": -1}, {"time": []}, {"time": 1e300}]
)
def test_exit_that_no_supervisor_wrote_is_no_evidence(change: dict[str, Any]) -> None:
    end = verdict(Files({**END, **change}, True), None, False, 7.0)
    assert (end.status, end.signal, end.killed, end.started, end.lost) == LOST


@pytest.mark.parametrize("wrong", [None, 7, "x", [], [1], ["a", "b"], [-1, 2], [1, "b"], [1 << 40, 1], [True, 1]])
def test_processes_that_no_supervisor_wrote_are_ignored(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "processes").write_text(json.dumps({"boot": "b", "script": wrong, "supervisor": [12, None]}))
    assert AllocationFolder(tmp_path).processes() == {"boot": "b", "supervisor": [12, None]}
