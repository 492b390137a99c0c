"""Following journals: only what is new, of some kinds only, whole lines only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from det_core.journal import Follower
from det_core.journal import _follow as module
from support.journals import open_journal


def steps(found: list[tuple[int, int, dict[str, Any]]]) -> list[int]:
    return [record["steps_completed"] for _, _, record in found]


@pytest.mark.parametrize("chunk", [64, 300, 1 << 20])
def test_each_record_comes_once_and_only_those_wanted(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    follower = Follower(tmp_path, ["restore"], group="validation")
    assert follower.new() == []
    journals = [open_journal(tmp_path, rank=rank) for rank in range(2)]
    seen: list[tuple[int, int, dict[str, Any]]] = []
    for round in range(5):
        for rank, journal in enumerate(journals):
            for i in range(20):
                journal.metrics("training", 100 * round + i, {"loss": 0.5, "text": '"kind":"restore"'})
            journal.metrics("validation", 10 * round + rank, {"loss": 1 / 3})
            journal.record("status", {"status": '"group":"validation"'})
            journal.record("restore", {"steps_completed": round})
            journal.flush()
        new = follower.new()
        assert [(rank, r["kind"]) for _, rank, r in new] == [
            (rank, kind) for rank in range(2) for kind in ("metrics", "restore")
        ]
        seen += new
    assert follower.new() == []
    assert steps([r for r in seen if r[2]["kind"] == "metrics"]) == [
        10 * r + rank for r in range(5) for rank in range(2)
    ]
    assert seen[0][2]["metrics"] == {"loss": 1 / 3}
    assert sorted(map(str, Follower(tmp_path, ["restore"], group="validation").new())) == sorted(map(str, seen))
    for journal in journals:
        journal.close()


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("validation", 1, {"loss": 1})
    journal.metrics("validation", 2, {"loss": 2})
    journal.close()
    (file,) = tmp_path.glob("journal-*")
    data = file.read_bytes()
    for cut in range(len(data)):
        os.truncate(file, 0)
        file.write_bytes(data[:cut])
        follower = Follower(tmp_path, group="validation")
        found = steps(follower.new())
        file.write_bytes(data)
        assert found + steps(follower.new()) == [1, 2], f"cut at {cut}"


def test_torn_lines_and_other_files_are_passed_over(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("validation", 1, {"loss": 1})
    journal.close()
    (file,) = tmp_path.glob("journal-*")
    with open(file, "ab") as f:
        f.write(b'{"kind":"metrics","group":"validation","se\n{"group":"validation"}\n\n')
    (tmp_path / "notes.jsonl").write_bytes(file.read_bytes())
    assert steps(Follower(tmp_path, group="validation").new()) == [1]
    assert Follower(tmp_path / "no", group="validation").new() == []
