"""Lines come out of the log as they went in, however the bytes were cut, and wherever reading begins anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.master.engines._supervisor._log import Flight, Log, record
from det_core.master.engines._tail import LONGEST, LogTail, last_lines, line_of

BYTES = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3", b"\xa4", b"\xff", b"\x00"]), min_size=1, max_size=12)
CHUNKS = st.lists(st.tuples(st.integers(0, 1), BYTES.map(b"".join)), max_size=20)


def write(path: Path, chunks: list[tuple[int, bytes]]) -> None:
    path.write_bytes(b"".join(record(stream, float(i), data) for i, (stream, data) in enumerate(chunks)))


def read_all(path: Path, mark: str | None = None, limit: int = 1 << 20) -> list[tuple[str, str]]:
    tail, found, more = LogTail(path, mark), [], True
    while more:
        lines, more = tail.read(limit)
        found += lines
    found += tail.finish()
    return [(line.stream, line.text) for line in found]


def expected(chunks: list[tuple[int, bytes]], stream: int) -> list[str]:
    data = b"".join(d for s, d in chunks if s == stream).replace(b"\r\n", b"\n")
    parts = data.replace(b"\r", b"\n").split(b"\n")
    kept, at = [], 0
    for i, part in enumerate(parts):
        at += len(part)
        ends = data[at : at + 1]
        if part or (ends == b"\n" and i < len(parts) - 1):
            kept.append(part)
        at += 1
    return [part.decode("utf-8", "replace").replace("\0", "\ufffd") for part in kept]


@given(CHUNKS)
def test_each_stream_comes_out_as_its_lines(chunks: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write(path, chunks)
        found = read_all(path)
        for stream, name in enumerate(("stdout", "stderr")):
            assert [text for of, text in found if of == name] == expected(chunks, stream)


@given(CHUNKS, st.integers(1, 200))
def test_reading_goes_on_at_any_mark(chunks: list[tuple[int, bytes]], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write(path, chunks)
        whole = read_all(path)
        tail, before, more = LogTail(path), [], True
        while more:
            lines, more = tail.read(limit)
            before += [(line.stream, line.text) for line in lines]
            after = read_all(path, tail.mark)
            assert sorted(before + after) == sorted(whole)
            for name in ("stdout", "stderr"):
                assert [x for x in before + after if x[0] == name] == [x for x in whole if x[0] == name]


def test_a_long_line_goes_on_in_the_next_and_no_character_is_cut(tmp_path: Path) -> None:
    text = "\u4e2d" * LONGEST
    write(tmp_path / "log", [(0, piece) for piece in _pieces(text.encode(), 50_001)] + [(0, b"\nend\n")])
    lines = [text for _, text in read_all(tmp_path / "log")]
    assert lines[-1] == "end"
    assert "".join(lines[:-1]) == text
    assert len(lines) == 5
    assert max(len(line.encode()) for line in lines) <= LONGEST


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def test_what_is_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    path, line = tmp_path / "log", record(0, 1.0, b"one\n")
    path.write_bytes(line[:-5])
    tail = LogTail(path)
    assert tail.read() == ([], False)
    path.write_bytes(line)
    assert [x.text for x in tail.read()[0]] == ["one"]


def test_a_record_that_a_power_failure_spoilt_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(record(0, 1.0, b"one\n") + b"\0\0\0\n" + record(0, 2.0, b"two\n"))
    assert [text for _, text in read_all(path)] == ["one", "two"]


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
def test_rank_and_level(text: str, rank: int | None, level: str | None, rest: str) -> None:
    line = line_of(1.0, "stdout", text.encode())
    assert (line.rank, line.level, line.text) == (rank, level, rest)


def test_the_last_lines_of_a_large_log(tmp_path: Path) -> None:
    write(tmp_path / "log", [(i % 2, f"line {i}\n".encode() * 100) for i in range(1000)])
    assert last_lines(tmp_path / "log", 3) == ("line 999",) * 3
    assert len(last_lines(tmp_path / "log", 150)) == 150
    assert last_lines(tmp_path / "none") == ()


def test_a_full_disk_stops_nobody_and_the_loss_is_counted() -> None:
    log = Log("/dev/full")
    for _ in range(3):
        log.add(b"x" * (8 << 20))
    assert log.waits
    assert log.lost == 8 << 20
    log.close()
    assert log.lost == 24 << 20


@pytest.mark.parametrize("torn", [0, 1, 17, None])
def test_what_was_read_before_a_death_stands_once(tmp_path: Path, torn: int | None) -> None:
    """The worker died after it had read, while it wrote (``torn`` bytes), or right after."""
    source, target = os.pipe()
    flight, path = Flight(), tmp_path / "log"
    os.write(target, b"two\n")
    line = flight.read(source, 1)
    path.write_bytes(record(0, 1.0, b"one\n") + line[:torn])
    log = Log(str(path))
    log.mend(flight.left())
    log.close()
    assert read_all(path) == [("stdout", "one"), ("stderr", "two")]
    flight.landed()
    assert flight.left() == b""
    os.close(source)
    os.close(target)
