"""Records are carried once each, in order, whatever becomes of the files meanwhile."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from det_core.journal import Journal, Line, Tail, tails


def journal(folder: Path, restart: int = 0, rank: int = 0, run_id: str = "r") -> Journal:
    return Journal(folder, run_id=run_id, restart=restart, rank=rank)


def carry(tail: Tail, limit: int = 1 << 20) -> list[int]:
    """The numbers of all that is new."""
    found = []
    while lines := tail.read(limit):
        found += [line.seq for line in lines]
        tail.mark(lines)
    tail.save()
    return found


def test_what_is_new_in_order_and_as_it_stands(tmp_path: Path) -> None:
    j, tail = journal(tmp_path), Tail(tmp_path, 0, 0)
    assert tail.read() == []
    j.metrics("training", 1, {"loss": float("nan"), "text": "NaN"})
    j.record("status", {"status": "x"})
    lines = tail.read()
    assert [line.seq for line in lines] == [0, 1] and tail.read() == lines, "given again until it is marked"
    assert json.loads(lines[0].text) == lines[0].record
    assert lines[0].record["metrics"] == {"loss": "NaN", "text": "NaN"}
    assert lines[0].record["nonfinite"] == [["metrics", "loss"]]
    assert tail.left() == 2
    tail.mark(lines)
    assert tail.left() == 0 and tail.read() == []
    j.metrics("training", 2, {"loss": 1})
    assert carry(tail) == [2]
    j.close()


def test_small_bites_and_lines_longer_than_a_bite(tmp_path: Path) -> None:
    j = journal(tmp_path)
    for step in range(50):
        j.metrics("training", step, {"text": "x" * (step * 20)})
    j.close()
    assert carry(Tail(tmp_path, 0, 0), 64) == list(range(50))


def test_it_goes_on_where_another_process_stopped(tmp_path: Path) -> None:
    j = journal(tmp_path)
    for step in range(10):
        j.metrics("training", step, {"a": step})
    first = Tail(tmp_path, 0, 0, to="here")
    lines = first.read()
    first.mark(lines[:4])
    first.save()
    assert carry(Tail(tmp_path, 0, 0, to="here")) == [4, 5, 6, 7, 8, 9]
    assert carry(Tail(tmp_path, 0, 0, to="elsewhere")) == list(range(10))
    assert len(list(tmp_path.glob("shipped-*"))) == 1
    (tmp_path / "shipped-0-0.json").write_text("{")
    assert carry(Tail(tmp_path, 0, 0, to="here")) == list(range(10))
    j.close()


def test_a_line_that_is_not_ended_waits(tmp_path: Path) -> None:
    j, tail = journal(tmp_path), Tail(tmp_path, 0, 0)
    j.metrics("training", 1, {"a": 1})
    path = tmp_path / "journal-0-0.jsonl"
    whole = path.read_bytes() + b'{"kind":"status","seq":1,"time":1.0,"body":{}}\n'
    path.write_bytes(whole[:-10])
    assert carry(tail) == [0]
    with path.open("ab") as f:
        f.write(whole[-10:] + b"torn\n" + whole[whole.index(b"\n") + 1 :])
    assert carry(tail) == [1], "the torn line is passed over, and what stands twice counts once"
    j.close()


def test_a_file_that_was_lost_and_copied_doubles_nothing(tmp_path: Path) -> None:
    j, tail = journal(tmp_path), Tail(tmp_path, 0, 0)
    for step in range(5):
        j.metrics("training", step, {"a": step})
    assert carry(tail) == [0, 1, 2, 3, 4]
    os.unlink(tmp_path / "journal-0-0.jsonl")
    j.flush()
    for step in range(5, 8):
        j.metrics("training", step, {"a": step})
    j.close()
    assert carry(tail) == [5, 6, 7]


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_numbers_in_any_order_are_each_known_once(count: int, chance: random.Random) -> None:
    tail = Tail(Path("/nowhere"), 0, 0)
    numbers = [chance.randrange(80) for _ in range(count)]
    for number in numbers:
        tail.mark([Line(number, b"", {})])
    assert [n for n in range(80) if n in tail] == sorted(set(numbers))
    assert all(end < start for end, start in zip(tail._ends, tail._starts[1:], strict=False)), "ranges that touch"


def test_one_for_each_process_that_wrote(tmp_path: Path) -> None:
    for restart, rank, run_id in ((0, 0, "a"), (0, 1, "a"), (1, 0, "b")):
        j = journal(tmp_path, restart, rank, run_id)
        j.record("status", {"status": "x"})
        j.close()
    assert [(t.restart, t.rank) for t in tails(tmp_path)] == [(0, 0), (0, 1), (1, 0)]
    assert [(t.restart, t.rank) for t in tails(tmp_path, run_id="a")] == [(0, 0), (0, 1)]
    assert tails(tmp_path / "none") == []
