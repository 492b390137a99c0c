"""Lines come out of the log as they went in, however the bytes were cut, and wherever reading begins anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.master.engines._log_reader import LogReader, last_lines, line_of
from det_core.master.engines._supervisor._output import MAX_LINE_CHARS, OutputLog

BYTES = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3", b"\xa4", b"\xff", b"\x00"]), min_size=1, max_size=12)
CHUNKS = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), BYTES.map(b"".join)), max_size=20)
LINE = b'{"time":1.0,"stream":"stdout","lines":["%s"]}\n'


def write(path: Path, chunks: list[tuple[str, bytes]]) -> None:
    log = OutputLog(str(path))
    for stream, data in chunks:
        log.add(stream, data)
    log.close()
    assert log.lost == 0


def read_all(path: Path, mark: str | None = None) -> list[tuple[str, str]]:
    reader = LogReader(path, mark)
    found = []
    more = True
    while more:
        lines, more = reader.read()
        found += [(line.stream, line.text) for line in lines]
    return found


def expected(chunks: list[tuple[str, bytes]], stream: str) -> list[str]:
    """Return a stream's lines: a ``\\r`` at the start of a line is dropped, and so is one at the very end."""
    data = b"".join(d for s, d in chunks if s == stream).replace(b"\r\n", b"\n")
    parts = data.replace(b"\r", b"\n").split(b"\n")
    kept = []
    at = 0
    for i, part in enumerate(parts):
        at += len(part)
        ends = data[at : at + 1]
        if part or (ends == b"\n" and i < len(parts) - 1):
            kept.append(part)
        at += 1
    return [part.decode("utf-8", "replace").replace("\0", "\ufffd") for part in kept]


@given(CHUNKS)
def test_each_stream_comes_out_as_its_lines(chunks: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write(path, chunks)
        found = read_all(path)
        for stream in ("stdout", "stderr"):
            assert [text for of, text in found if of == stream] == expected(chunks, stream)


@given(CHUNKS, st.integers(1, 200))
def test_reading_goes_on_at_any_mark(chunks: list[tuple[str, bytes]], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write(path, chunks)
        whole = read_all(path)
        reader = LogReader(path)
        before = []
        more = True
        while more:
            lines, more = reader.read(limit)
            before += [(line.stream, line.text) for line in lines]
            assert before + read_all(path, reader.mark) == whole


def test_long_line_goes_on_in_the_next_one(tmp_path: Path) -> None:
    text = "\u4e2d" * (2 * MAX_LINE_CHARS + 7)
    data = text.encode() + b"\nend\n"
    write(tmp_path / "log", [("stdout", data[i : i + 50_001]) for i in range(0, len(data), 50_001)])
    lines = [text for _, text in read_all(tmp_path / "log")]
    assert lines[-1] == "end"
    assert "".join(lines[:-1]) == text
    assert [len(line) for line in lines[:-1]] == [MAX_LINE_CHARS, MAX_LINE_CHARS, 7]


def test_record_being_written_is_left_for_the_next_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(LINE[:-5])
    reader = LogReader(path)
    assert reader.read() == ([], False)
    path.write_bytes(LINE)
    assert [x.text for x in reader.read()[0]] == ["%s"]


@pytest.mark.parametrize(
    "bad",
    [b"\0\0\0", b"[1]", b"7", b"{}", b'{"time":1,"stream":"stdout","lines":[7]}', b'{"time":[],"stream":0,"lines":0}'],
)
def test_damaged_record_is_passed_over(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(LINE % b"one" + bad + b"\n" + LINE % b"two")
    assert [text for _, text in read_all(path)] == ["one", "two"]
    assert last_lines(path) == ("one", "two")


@pytest.mark.parametrize(
    ("text", "rank", "level", "rest"),
    [
        ("[rank=12] INFO: [7] x: y", 12, "INFO", "[7] x: y"),
        ("CRITICAL: x", None, "CRITICAL", "x"),
        ("[rank=1]x", None, None, "[rank=1]x"),
        ("NOTICE: x", None, None, "NOTICE: x"),
        ("x ERROR: y", None, None, "x ERROR: y"),
        ("[rank=0] ", 0, None, ""),
    ],
)
def test_rank_and_level_at_the_start_of_a_line_are_taken_out(
    text: str, rank: int | None, level: str | None, rest: str
) -> None:
    line = line_of(1.0, "stdout", text)
    assert (line.rank, line.level, line.text) == (rank, level, rest)


def test_last_lines_of_a_large_log(tmp_path: Path) -> None:
    write(tmp_path / "log", [("stdout", f"line {i}\n".encode() * 100) for i in range(1000)])
    assert last_lines(tmp_path / "log", 3) == ("line 999",) * 3
    assert len(last_lines(tmp_path / "log", 150)) == 150
    assert last_lines(tmp_path / "none") == ()


def test_full_disk_stops_nobody_and_the_loss_is_counted() -> None:
    log = OutputLog("/dev/full")
    for _ in range(3):
        log.add("stdout", b"x" * 100 + b"\n")
        log.add("stdout", (b"x" * 1000 + b"\n") * 8000)
    assert 0 < log.lost < 17_000_000
    log.close()
    assert 24_000_000 < log.lost < 26_000_000


def test_output_that_has_not_ended_is_in_the_log_at_the_end(tmp_path: Path) -> None:
    write(tmp_path / "log", [("stdout", b"no end"), ("stderr", b"bar 1\rbar 2\r")])
    assert read_all(tmp_path / "log") == [("stderr", "bar 1"), ("stdout", "no end"), ("stderr", "bar 2")]
