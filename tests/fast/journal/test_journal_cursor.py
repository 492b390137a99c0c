"""Records are carried in order, each of them, and not again once they were marked, whatever becomes of the files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from det_core.journal import Cursor, Journal, open_cursors
from support.journals import failing, open_journal


def journal(folder: Path, restart: int = 0, rank: int = 0, run_id: str = "r") -> Journal:
    return Journal(folder, run_id=run_id, restart=restart, rank=rank)


def carry(cursor: Cursor) -> list[int]:
    """Return the numbers of all new records, and advance past them."""
    found = []
    while lines := cursor.read():
        found += [line.seq for line in lines]
        cursor.advance(lines)
    cursor.save()
    return found


def test_read_returns_new_lines_in_order_as_written(tmp_path: Path) -> None:
    j, cursor = journal(tmp_path), Cursor(tmp_path, 0, 0)
    assert cursor.read() == []
    j.metrics("training", 1, {"loss": float("nan"), "text": "NaN"})
    j.record("status", {"status": "x"})
    lines = cursor.read()
    assert [line.seq for line in lines] == [0, 1] and cursor.read() == lines, "given again until it is marked"
    assert json.loads(lines[0].text) == lines[0].record
    assert lines[0].record["metrics"] == {"loss": "NaN", "text": "NaN"}
    assert lines[0].record["nonfinite"] == [["metrics", "loss"]]
    assert repr(lines[0].decoded()["metrics"]) == "{'loss': nan, 'text': 'NaN'}"
    assert cursor.count_remaining() == 2
    cursor.advance(lines)
    assert cursor.count_remaining() == 0 and cursor.read() == []
    assert cursor.offset == (tmp_path / "journal-0-0.jsonl").stat().st_size
    j.metrics("training", 2, {"loss": 1})
    assert carry(cursor) == [2]
    cursor.advance(lines)
    assert carry(cursor) == [], "what is marked late, as it was refused, takes nothing back"
    j.close()


def test_read_with_small_chunks_returns_every_line(tmp_path: Path) -> None:
    j = journal(tmp_path)
    for step in range(12):
        j.metrics("training", step, {"text": "x" * (step * 300_000)})
    j.close()
    cursor = Cursor(tmp_path, 0, 0)
    assert 1 < len(cursor.read()) < 6
    assert carry(cursor) == list(range(12))


def test_cursor_of_a_new_process_continues_at_saved_offset(tmp_path: Path) -> None:
    j = journal(tmp_path)
    for step in range(10):
        j.metrics("training", step, {"a": step})
    first = Cursor(tmp_path, 0, 0, to="here")
    lines = first.read()
    first.advance(lines[:4])
    first.save()
    assert carry(Cursor(tmp_path, 0, 0, to="here")) == [4, 5, 6, 7, 8, 9]
    assert carry(Cursor(tmp_path, 0, 0, to="elsewhere")) == list(range(10))
    assert len(list(tmp_path.glob("shipped-*"))) == 1
    v1 = '{"version":1,"to":"here","done":[[0,5]]}'  # of an earlier version
    for content in ("{", v1, '{"version":3,"to":"here","offset":1}', '{"version":2,"to":"here","offset":"x"}'):
        (tmp_path / "shipped-0-0.json").write_text(content)
        assert carry(Cursor(tmp_path, 0, 0, to="here")) == list(range(10))
    j.close()


def test_cursor_over_several_files_counts_them_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions went on in a second file after trouble."""
    j = journal(tmp_path)
    for step in range(6):
        j.metrics("training", step, {"a": step})
    j.close()
    header, *rows = (tmp_path / "journal-0-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal-0-0.jsonl").write_bytes(header + b"".join(rows[:3]) + rows[3][:20])
    (tmp_path / "journal-0-0.1.jsonl").write_bytes(b"\n" + header + b"".join(rows[3:]))
    cursor = Cursor(tmp_path, 0, 0)
    with monkeypatch.context() as patch:  # as when a process has no descriptor left
        patch.setattr("det_core.journal._cursor.open_file", lambda _path: None)
        assert carry(cursor) == []
    assert carry(cursor) == [0, 1, 2, 3, 4, 5]
    more = journal(tmp_path)
    more.record("checkpoint_deleted", {})
    more.close()
    assert carry(Cursor(tmp_path, 0, 0)) == [6], "what a client adds is behind all that was carried"


def test_read_before_end_of_line_returns_nothing(tmp_path: Path) -> None:
    j, cursor = journal(tmp_path), Cursor(tmp_path, 0, 0)
    j.metrics("training", 1, {"a": 1})
    path = tmp_path / "journal-0-0.jsonl"
    whole = path.read_bytes() + b'{"kind":"status","seq":1,"time":1.0,"body":{}}\n'
    path.write_bytes(whole[:-10])
    assert carry(cursor) == [0]
    with path.open("ab") as f:
        f.write(whole[-10:] + b"torn\n\n")
    assert carry(cursor) == [1] and carry(cursor) == [], "the torn line is passed over"
    j.close()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_cursor_after_restored_file_repeats_no_record(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"
    j, cursor = open_journal(folder), Cursor(folder, 0, 0)
    with failing(3, part=True, only="write"):
        for step in range(5):
            j.metrics("training", step, {"a": step})
        assert carry(cursor) == [0, 1, 2, 3, 4]
        os.unlink(folder / "journal-0-0.jsonl") if what == "file" else shutil.rmtree(folder)
        assert carry_nothing(cursor)
        j.flush()
        for step in range(5, 8):
            j.metrics("training", step, {"a": step})
        j.close()
    assert carry(cursor) == [5, 6, 7]


def carry_nothing(cursor: Cursor) -> bool:
    """Whether there is nothing to carry now; what it knows stays as it is."""
    before = cursor.offset
    return cursor.read() == [] and cursor.offset == before


def test_open_cursors_returns_one_per_process(tmp_path: Path) -> None:
    for restart, rank, run_id in ((0, 0, "a"), (0, 1, "a"), (1, 0, "b")):
        j = journal(tmp_path, restart, rank, run_id)
        j.record("status", {"status": "x"})
        j.close()
    assert [(c.restart, c.rank) for c in open_cursors(tmp_path)] == [(0, 0), (0, 1), (1, 0)]
    assert [(c.restart, c.rank) for c in open_cursors(tmp_path, run_id="a")] == [(0, 0), (0, 1)]
    assert open_cursors(tmp_path / "none") == []


def test_torn_header_is_written_again(tmp_path: Path) -> None:
    with failing(0, more=2, part=True, only="write"):
        j = journal(tmp_path, run_id="a")
        for step in range(4):
            j.metrics("training", step, {"a": step})
        j.close()
    (cursor,) = open_cursors(tmp_path, run_id="a")
    assert carry(cursor) == [0, 1, 2, 3]
