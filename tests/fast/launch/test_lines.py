"""Prefixes on lines of any bytes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.launch._wrapper import _lines
from det_core.launch._wrapper._lines import Prefixer

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
def test_each_line_gets_the_prefix(chunks: list[bytes], expected: list[bytes]) -> None:
    assert prefixed(chunks) == b"".join(P + line for line in expected)


def test_on_a_terminal_a_bar_is_drawn_over_itself() -> None:
    assert prefixed([b"\r 1%\r 2%", b"\r 3%\nok\r\n"], terminal=True) == b"".join(
        [P, b" 1%\r", P, b" 2%\r", P, b" 3%\n", P, b"ok\r\n"]
    )


PIECES = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b"[rank=3] "]), max_size=30)


@given(PIECES, st.data(), st.booleans())
def test_it_makes_no_difference_how_the_stream_is_cut(pieces: list[bytes], data: st.DataObject, terminal: bool) -> None:
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert prefixed(chunks, terminal=terminal) == prefixed([stream], terminal=terminal)


@given(PIECES)
def test_nothing_is_lost_but_idle_returns(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    lines = prefixed([stream]).splitlines(keepends=True) if b"\r" not in stream.replace(b"\r\n", b"") else []
    if lines:
        back = b"".join(line[len(P) :] for line in re.findall(rb"[^\n]*\n", b"".join(lines)))
        assert back == (stream if stream.endswith(b"\n") else stream + b"\n")
    visible = re.sub(rb"[\r\n]", b"", stream)
    assert re.sub(rb"[\r\n]", b"", prefixed([stream]).replace(P, b"")) == visible.replace(P, b"")


def test_a_line_of_10_mb_stays_one_line() -> None:
    chunks = [b"x" * 65536] * 160
    assert prefixed([*chunks, b"\nend"]) == P + b"".join(chunks) + b"\n" + P + b"end\n"


def test_a_line_without_end_is_cut_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lines, "LONGEST_LINE", 10)
    assert prefixed([b"12345678", b"9012", b"34\n"]) == P + b"123456789012\n" + P + b"34\n"
