"""Lines come out of a log as they went in, however the bytes were cut, and wherever reading begins anew."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.master.engines._logs import EVERY_LINE, Entry, LineFilter, LogFile, LogLine, last_lines
from det_core.master.engines._supervisor._log import (
    MAX_LINE_BYTES,
    LogWriter,
    OutputLog,
    find_segments,
    segment_name,
)

BYTES = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3", b"\xa4", b"\xff", b"\x00"]), min_size=1, max_size=12)
CHUNKS = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), BYTES.map(b"".join)), max_size=20)
KEY = (0, "supervisor")
LINE = b"1.000000 o %s\n"


def write(directory: Path, chunks: list[tuple[str, bytes]], **limits: int) -> None:
    log = OutputLog(LogWriter(str(directory), *KEY, **limits))
    for stream, data in chunks:
        log.add(stream, data)
    log.close()
    assert log.lost == 0


def lines_of(entries: Iterable[Entry]) -> list[tuple[Entry, LogLine]]:
    """Return the lines with their places, without the blocks."""
    return [(entry, entry.line) for entry in entries if entry.line is not None]


def read_all(directory: Path, offset: int = 0, choice: LineFilter = EVERY_LINE) -> list[LogLine]:
    logs = LogFile.find(directory)
    return [line for log in logs for _, line in lines_of(log.forward(offset, choice))]


def texts(directory: Path, offset: int = 0) -> list[tuple[str, str]]:
    return [(line.stream, line.text) for line in read_all(directory, offset)]


def expected(chunks: list[tuple[str, bytes]], stream: str) -> list[str]:
    """Return a stream's lines: of those that a ``\\r`` ends, the last before another; none that is empty."""
    data = b"".join(d for s, d in chunks if s == stream).replace(b"\r\n", b"\n")
    kept: list[bytes] = []
    for part in data.split(b"\n"):
        *bars, rest = part.split(b"\r")
        kept += [bar for bar in bars if bar][-1:]
        kept.append(rest)
    if not kept[-1]:
        kept.pop()
    return [part.decode("utf-8", "replace").replace("\0", "\ufffd") for part in kept]


@given(CHUNKS)
def test_each_stream_comes_out_as_its_lines(chunks: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), chunks)
        found = texts(Path(folder))
        for stream in ("stdout", "stderr"):
            assert [text for of, text in found if of == stream] == expected(chunks, stream)


@given(CHUNKS, st.integers(1, 200))
def test_log_in_segments_reads_on_from_any_line_in_both_directions(
    chunks: list[tuple[str, bytes]], segment_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), chunks, segment_bytes=segment_bytes)
        for log in LogFile.find(Path(folder)):
            whole = lines_of(log.forward(0, EVERY_LINE))
            assert [entry.end for entry, _ in whole] == [*[e.begin for e, _ in whole[1:]], log.length][: len(whole)]
            for index, (entry, _) in enumerate(whole):
                assert lines_of(log.forward(entry.begin, EVERY_LINE)) == whole[index:]
                assert lines_of(log.backward(entry.begin, EVERY_LINE))[::-1] == whole[:index]
                assert log.after(entry.begin) == entry.end


def test_middle_of_a_long_log_is_deleted_and_noted(tmp_path: Path) -> None:
    log = OutputLog(LogWriter(str(tmp_path), *KEY, segment_bytes=10_000, kept_bytes=50_000))
    for number in range(20_000):
        log.add("stdout", b"line %d\n" % number)
        if number % 1000 == 0:
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 120_000
    log.close()
    (file,) = LogFile.find(tmp_path)
    whole = lines_of(file.forward(0, EVERY_LINE))
    numbers = [line.text for _, line in whole]
    (gap,) = [index for index, text in enumerate(numbers) if not text.startswith("line ")]
    before, note = whole[gap - 1][0], whole[gap][0]
    assert numbers[gap].startswith(f"{note.end - before.end} bytes of this log were deleted here")
    assert numbers[:gap] == [f"line {n}" for n in range(gap)] and gap > 1000
    assert numbers[gap + 1 :] == [f"line {n}" for n in range(20_000 - len(numbers) + gap + 1, 20_000)]
    assert lines_of(file.backward(file.length, EVERY_LINE))[::-1] == whole
    assert file.length == whole[-1][0].end > 400_000
    assert file.after(note.begin) == note.end, "the note is not read twice"
    for lost in (before.end, before.end + 100, note.end - 20):
        assert lines_of(file.forward(file.after(lost), EVERY_LINE)) == whole[gap:], "it follows on lines that were read"


def test_progress_bar_is_written_once_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    log = OutputLog(LogWriter(str(tmp_path), *KEY))
    for step in range(400):
        clock[0] = step / 100
        log.add("stderr", b"\r%d%%" % step)
    log.add("stdout", b"other\n")
    clock[0] = 9.0
    log.flush()
    log.add("stderr", b"\rdone\n")
    log.close()
    bars = [text for stream, text in texts(tmp_path) if stream == "stderr"]
    assert bars == ["100%", "201%", "302%", "398%", "399%", "done"]


def test_long_line_goes_on_in_the_next_one(tmp_path: Path) -> None:
    text = "\u4e2d" * MAX_LINE_BYTES
    data = text.encode() + b"\nend\n"
    write(tmp_path, [("stdout", data[i : i + 50_001]) for i in range(0, len(data), 50_001)])
    lines = [text for _, text in texts(tmp_path)]
    assert lines[-1] == "end"
    assert "".join(lines[:-1]) == text
    assert {len(line.encode()) for line in lines[:-2]} == {MAX_LINE_BYTES - 1}


def test_line_being_written_is_left_for_the_next_read(tmp_path: Path) -> None:
    path = tmp_path / segment_name(*KEY, 0)
    path.write_bytes(LINE[:-5])
    assert texts(tmp_path) == []
    path.write_bytes(LINE % b"x")
    assert texts(tmp_path) == [("stdout", "x")]


def test_line_torn_by_a_kill_ends_where_its_writer_goes_on(tmp_path: Path) -> None:
    (tmp_path / segment_name(*KEY, 0)).write_bytes(LINE % b"one" + b"1.000000 o to")
    write(tmp_path, [("stdout", b"two\n")])
    assert texts(tmp_path) == [("stdout", "one"), ("stdout", "to"), ("stdout", "two")]


@pytest.mark.parametrize("bad", [b"\0\0\0", b"7", b"", b"x o y", b"1.0 o y", b"1.000000 z y", b"x" * (3 << 20)])
def test_damage_is_passed_over(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / segment_name(*KEY, 0)).write_bytes(LINE % b"one" + bad + b"\n" + LINE % b"two")
    assert [text for _, text in texts(tmp_path)] == ["one", "two"]
    assert last_lines(tmp_path)[-1:] == ("two",)


@pytest.mark.parametrize("bad", [b"{}", b"[]", b"7", b'{"time":1e99,"stream":"stdout","text":""}', b'{"text":7}'])
def test_damaged_lines_of_the_master_are_passed_over(tmp_path: Path, bad: bytes) -> None:
    good = LogLine(1.0, "stderr", 3, "ERROR", "half \ud800", source="alert", allocation_id="a.1")
    (tmp_path / segment_name(0, "master", 0)).write_bytes(
        b"1.000000 j %s\n" % bad + b"1.000000 j %s\n" % good.to_json()
    )
    assert read_all(tmp_path) == [good._replace(text="half \ufffd")]


def test_what_is_not_a_segment_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, [("stdout", b"x\n")])
    os.mkfifo(tmp_path / segment_name(1, "supervisor", 0))
    (tmp_path / "0.supervisor.01").touch()
    (tmp_path / segment_name(2, "supervisor", 0)).mkdir()
    assert set(find_segments(str(tmp_path))) == {KEY, (1, "supervisor"), (2, "supervisor")}
    assert texts(tmp_path) == [("stdout", "x")]
    assert find_segments(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("text", "rank", "level", "rest"),
    [
        ("[rank=12] INFO: [7] x: y", 12, "INFO", "[7] x: y"),
        ("CRITICAL: x", None, "CRITICAL", "x"),
        ("[rank=1]x", None, None, "[rank=1]x"),
        ("NOTICE: x", None, None, "NOTICE: x"),
        ("x ERROR: y", None, None, "x ERROR: y"),
        ("[rank=0] ", 0, None, ""),
        ("[rank=2] DEBUG: z", 2, "DEBUG", "z"),
    ],
)
def test_rank_and_level_at_the_start_of_a_line_are_taken_out(
    tmp_path: Path, text: str, rank: int | None, level: str | None, rest: str
) -> None:
    write(tmp_path, [("stdout", text.encode() + b"\n")])
    (line,) = read_all(tmp_path)
    assert (line.rank, line.level, line.text) == (rank, level, rest)
    for choice in [LineFilter(lowest) for lowest in ("DEBUG", "INFO", "WARNING", "CRITICAL")] + [LineFilter(rank=2)]:
        assert read_all(tmp_path, choice=choice) == [line] * choice.accepts(line.rank, line.level)


def test_last_lines_of_a_large_log(tmp_path: Path) -> None:
    write(tmp_path, [("stdout", f"line {i}\n".encode() * 100) for i in range(1000)])
    assert last_lines(tmp_path, 3) == ("line 999",) * 3
    assert len(last_lines(tmp_path, 150)) == 150
    assert last_lines(tmp_path / "none") == ()


def test_full_disk_stops_nobody_and_the_loss_is_counted(tmp_path: Path) -> None:
    (tmp_path / segment_name(*KEY, 0)).symlink_to("/dev/full")
    log = OutputLog(LogWriter(str(tmp_path), *KEY))
    for _ in range(3):
        log.add("stdout", b"x" * 100 + b"\n")
        log.add("stdout", (b"x" * 1000 + b"\n") * 8000)
    assert 0 < log.lost < 17_000_000
    log.close()
    assert 24_000_000 < log.lost < 26_000_000


def test_times_do_not_decrease_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter(str(tmp_path), *KEY)
    moments = iter([5.0, 4.0, 6.0])
    monkeypatch.setattr("time.time", lambda: next(moments))
    stamps = [float(log.stamp()) for _ in range(3)]
    log.close()
    assert stamps == [5.0, 5.0, 6.0] and all(a <= b for a, b in pairwise(stamps))
