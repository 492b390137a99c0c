"""The logs of a trial's runs, nodes and writers are read as one, from any line on, in either direction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from det_core.master.engines import ID_PATTERN, LineFilter, LogLine, Position, TrialLog, append_lines, delete_folders
from det_core.master.engines._supervisor._log import segment_name

SOURCES = [(1, 0, "supervisor"), (1, 1, "supervisor"), (1, 0, "task"), (3, 0, "supervisor"), (3, 0, "master")]


@pytest.fixture
def log(tmp_path: Path) -> TrialLog:
    """Return a log of 500 lines: one a second, of five sources in turn, in segments of ten lines."""
    data: dict[tuple[int, int, str], list[bytes]] = {source: [] for source in SOURCES}
    for time in range(500):
        source = SOURCES[time % 3 if time < 300 else 3 + time % 2]
        line = b"%d.000000 o %s%d\n" % (time, b"ERROR: " if time % 50 == 0 else b"", time)
        if source[2] != "supervisor":
            fields = LogLine(time, "stdout", None, "ERROR" if time % 50 == 0 else None, str(time))
            line = b"%d.000000 j %s\n" % (time, fields.to_json())
        data[source].append(line)
    for (run, node, writer), lines in data.items():
        directory = tmp_path / f"1.r.{run}" / "log"
        directory.mkdir(parents=True, exist_ok=True)
        start = 0
        for first in range(0, len(lines), 10):
            part = b"".join(lines[first : first + 10])
            (directory / segment_name(node, writer, start)).write_bytes(part)
            start += len(part)
    return TrialLog(tmp_path, "1.r", 3)


def numbers(log: TrialLog, at: Position, **options: object) -> list[int]:
    return [int(line.line.text) for line in log.read(at, **options).lines]  # type: ignore[arg-type]


def test_reading_goes_on_behind_and_before_any_line(log: TrialLog) -> None:
    whole = log.read(Position())
    assert [int(line.line.text) for line in whole.lines] == list(range(500)) and whole.is_end
    assert len({line.id for line in whole.lines}) == 500
    for number, (line_id, _, _) in list(enumerate(whole.lines))[::31]:
        assert re.match(ID_PATTERN, line_id)
        assert numbers(log, log.after(line_id), max_lines=3) == list(range(number + 1, 500))[:3]
        assert (
            numbers(log, log.tail(Position.from_text(line_id), 3).begin, end=Position.from_text(line_id))
            == list(range(number))[-3:]
        )
    assert [int(line.line.text) for line in log.read(whole.next).lines] == []


def test_pages_of_any_size_give_each_line_once(log: TrialLog) -> None:
    for limit, max_bytes in ((7, 1 << 20), (1000, 1)):
        at = Position()
        found = []
        is_end = False
        while not is_end:
            page = log.read(at, max_lines=limit, max_bytes=max_bytes)
            assert len(page.lines) <= limit
            found += [int(line.line.text) for line in page.lines]
            at, is_end = page.next, page.is_end
        assert found == list(range(500))


def test_tail_level_and_time_choose_lines(log: TrialLog) -> None:
    tail = log.tail(log.end, 120)
    assert (tail.count, tail.is_begin) == (120, False)
    assert numbers(log, tail.begin) == list(range(380, 500))
    errors = LineFilter("ERROR")
    assert numbers(log, log.tail(log.end, 3, errors).begin, choice=errors) == [350, 400, 450]
    assert numbers(log, Position(), choice=errors) == list(range(0, 500, 50))
    assert numbers(log, log.at(123.5), end=log.at(310)) == list(range(124, 310))
    assert log.tail(log.end, 501).is_begin
    found = 0
    end = log.end
    while found < 500:
        step = log.tail(end, 500 - found, max_bytes=1)
        assert step.count > 0, "a look at few bytes goes on where it came to"
        found += step.count
        end = step.begin


def test_line_of_one_node_that_comes_late_is_not_left_out(log: TrialLog, tmp_path: Path) -> None:
    *_, (last, _, _) = log.read(Position()).lines
    late = tmp_path / "1.r.3" / "log" / segment_name(1, "supervisor", 0)
    late.write_bytes(b"10.000000 o 1000\n")
    assert numbers(log, log.after(last)) == [1000]


def test_lines_of_the_master_are_appended_whole_and_deleted_with_the_others(tmp_path: Path) -> None:
    text = "x" * 100_000 + "\n"
    append_lines(tmp_path, "1.r.2", "task", [LogLine(1.0, "stderr", 4, "TRACE", text, "mine", "1.r.1")])
    append_lines(tmp_path, "1.r.2", "master", [LogLine(2.0, "stdout", None, "INFO", "own\n")])
    lines = [line.line for line in TrialLog(tmp_path, "1.r", 2).read(Position()).lines]
    assert "".join(line.text + line.end for line in lines) == text + "own\n"
    assert [(line.rank, line.level, line.allocation_id) for line in lines] == [
        *[(4, "TRACE", "1.r.1")] * 2,
        (None, "INFO", "1.r.2"),
    ]
    (tmp_path / "1.other.1").mkdir()
    delete_folders(tmp_path, {"1.r"})
    assert [path.name for path in tmp_path.iterdir()] == ["1.other.1"]
