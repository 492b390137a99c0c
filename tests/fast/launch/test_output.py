"""Prefixes on lines of any bytes, and the thread that copies them to slow, closed and full readers."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.launch import _output
from det_core.launch._output import Output, Prefixer, write_all

P = b"[rank=3] "


def prefixed(chunks: list[bytes], *, terminal: bool = False) -> bytes:
    prefixer = Prefixer(P, terminal=terminal)
    return b"".join([prefixer.feed(chunk) for chunk in chunks if chunk] + [prefixer.flush()])


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b\nc", b"\n"], [b"ab\n", b"c\n"]),
        ([b"no end"], [b"no end\n"]),
        ([b"\n\n"], [b"\n", b"\n"]),
        ([b"dos\r\n\r\nline\r", b"\n"], [b"dos\r\n", b"\r\n", b"line\r\n"]),
        ([b"\r 1%", b"\r 2%\r", b" 3%\n"], [b" 1%\n", b" 2%\n", b" 3%\n"]),
        ([b"x\r\r\r\ny\r"], [b"x\r\n", b"y\n"]),
        ([b"\xff\xfe\x00\n\xc3", b"\xa4\n"], [b"\xff\xfe\x00\n", b"\xc3\xa4\n"]),
        ([], []),
    ],
)
def test_prefixer_puts_the_prefix_before_each_line(chunks: list[bytes], expected: list[bytes]) -> None:
    assert prefixed(chunks) == b"".join(P + line for line in expected)


def test_prefixer_on_a_terminal_draws_a_bar_over_itself() -> None:
    assert prefixed([b"\r 1%\r 2%", b"\r 3%\nok\r\n"], terminal=True) == b"".join(
        [P, b" 1%\r", P, b" 2%\r", P, b" 3%\n", P, b"ok\r\n"]
    )


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"name? ", None, b"thanks\n"], P + b"name? " + P + b"thanks\n"),
        ([b"a\nname? ", None], P + b"a\n" + P + b"name? "),
        ([b"wait ...", None, b"\nover\n"], P + b"wait ...\n" + P + b"over\n"),
        ([b"wait ...", None, b"\r", b"\nover", None], P + b"wait ...\r\n" + P + b"over"),
        ([b"wait ...", None, b"\rover", b"\n"], P + b"wait ...\r" + P + b"over\n"),
        ([b"\r 1%", None, b"\r 2%", None, b"\rover\n"], P + b" 1%\r" + P + b" 2%\r" + P + b"over\n"),
        ([b" 1%\r", None, b" 2%", None, b"\nname? ", None], P + b" 1%\r" + P + b" 2%\n" + P + b"name? "),
    ],
)
def test_prefixer_takes_prompts_but_not_bars(chunks: list[bytes | None], expected: bytes) -> None:
    prefixer = Prefixer(P, terminal=True)
    written = b""
    for chunk in chunks:
        if chunk is not None:
            written += prefixer.feed(chunk)
        elif prefixer.is_prompting:
            written += prefixer.take_prompt()
    assert written == expected


PIECES = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b"[rank=3] "]), max_size=30)


@given(PIECES, st.data(), st.booleans())
def test_prefixer_result_does_not_depend_on_the_pieces(
    pieces: list[bytes], data: st.DataObject, terminal: bool
) -> None:
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert prefixed(chunks, terminal=terminal) == prefixed([stream], terminal=terminal)


@given(PIECES)
def test_prefixer_drops_only_idle_returns(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    lines = prefixed([stream]).splitlines(keepends=True) if b"\r" not in stream.replace(b"\r\n", b"") else []
    if lines:
        back = b"".join(line[len(P) :] for line in re.findall(rb"[^\n]*\n", b"".join(lines)))
        assert back == (stream if stream.endswith(b"\n") else stream + b"\n")
    visible = re.sub(rb"[\r\n]", b"", stream)
    assert re.sub(rb"[\r\n]", b"", prefixed([stream]).replace(P, b"")) == visible.replace(P, b"")


def test_prefixer_keeps_a_line_of_10_mb() -> None:
    chunks = [b"x" * 65536] * 160
    assert prefixed([*chunks, b"\nend"]) == P + b"".join(chunks) + b"\n" + P + b"end\n"


def test_prefixer_cuts_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "MAX_LINE_BYTES", 10)
    assert prefixed([b"12345678", b"9012", b"34\n"]) == P + b"123456789012\n" + P + b"34\n"


def start_output(target: int) -> tuple[Output, int]:
    """Start a thread that copies rank 0's output to ``target``; return it and the descriptor to print to."""
    output = Output()
    end = output.pipe(0, target)
    output.start()
    return output, end


def close(output: Output) -> None:
    output.finish()
    assert os.read(output.done, 1) == b"", "the end of the thread"
    output.join()
    assert output.failure is None and output.ended(0)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_output_on_a_full_disk_counts_lost_bytes() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    output, end = start_output(full)
    with os.fdopen(end, "wb") as out:
        out.write(b"x" * 200_000 + b"\n")
    close(output)
    os.close(full)
    assert output.lost(0) == 200_001 + len(b"[rank=0] ")


def test_output_ends_while_another_process_holds_the_pipe(file: int) -> None:
    output, end = start_output(file)
    os.write(end, b"one\ntwo")
    output.finish()
    output.join()
    assert not output.ended(0), "someone may still write there"
    os.close(end)
    assert os.pread(file, 1000, 0) == output.tail(0) == b"[rank=0] one\n[rank=0] two\n"


def test_output_to_a_nonblocking_descriptor_is_complete() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    output, end = start_output(write)
    got = bytearray()

    def reader() -> None:
        while not got.endswith(b"end\n"):
            got.extend(os.read(read, 4096))

    thread = threading.Thread(target=reader)
    thread.start()
    with os.fdopen(end, "wb") as out:
        out.write(b"y" * 3_000_000 + b"\nend\n")
    close(output)
    thread.join()
    os.close(read)
    os.close(write)
    assert bytes(got) == b"[rank=0] " + b"y" * 3_000_000 + b"\n[rank=0] end\n"


def test_tail_returns_the_last_bytes_of_any_pieces(file: int) -> None:
    """Line by line, faster than the thread reads, and in one piece that is larger than the tail."""
    output, end = start_output(file)
    lines = [b"%d" % number * (number % 40 + 1) + b"\n" for number in range(20_000)]
    for line in lines[:3000]:
        os.write(end, line)
    with os.fdopen(end, "wb") as out:
        out.write(b"".join(lines[3000:]))
    close(output)
    whole = b"".join(b"[rank=0] " + line for line in lines)
    assert os.pread(file, len(whole) + 1, 0) == whole
    assert output.tail(0) == whole[-64 * 1024 :]


def test_print_notice_writes_between_lines(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output()
    end = output.pipe(7, 2)
    os.write(end, b"begun")
    output.print_notice("one\ntwo")
    output.start()
    os.write(end, b" and ended\n")
    os.close(end)
    close(output)
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "[launcher] one",
        "[launcher] two",
        "[rank=7] begun and ended",
    ]


def test_failure_of_the_thread_is_kept(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    def breaks(*_: object) -> None:
        raise MemoryError("no room for a line")

    monkeypatch.setattr(_output, "write_all", breaks)
    output, end = start_output(file)
    os.write(end, b"x\n")
    assert os.read(output.done, 1) == b""
    output.join()
    assert isinstance(output.failure, MemoryError)
    os.close(end)


def test_prompts_go_to_readers_and_whole_lines_to_files(file: int) -> None:
    read, write_end = os.pipe()
    output = Output(interactive=True)
    ends = [output.pipe(0, file), output.pipe(0, write_end)]
    output.start()
    os.write(ends[0], b"text")
    os.write(ends[1], b"name? ")
    assert os.read(read, 100) == b"[rank=0] name? "
    assert os.pread(file, 100, 0) == b""
    os.write(ends[0], b" and end\n")
    assert os.read(read, 100) == b"\n", "the prompt's line ends before another stream's"
    for end in ends:
        os.close(end)
    close(output)
    assert os.pread(file, 100, 0) == b"[rank=0] text and end\n"
    os.close(read)
    os.close(write_end)


def test_write_all_with_a_lock_takes_turns(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def writer(letter: bytes) -> None:
        lock = os.open(path, os.O_WRONLY)
        for _ in range(50):
            write_all(fd, letter * 100_000 + b"\n", lock)
        os.close(lock)

    threads = [threading.Thread(target=writer, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert {len(set(line)) for line in path.read_bytes().splitlines()} == {1}
