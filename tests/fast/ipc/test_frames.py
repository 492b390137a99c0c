"""The wire format: any cutting of the byte stream gives the same frames; foreign bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.ipc._frames import IN_FILE, UNTRUSTED_LIMIT, BadFrame, Cutter, Kind, encode, encode_head

_FRAMES = st.lists(
    st.tuples(
        st.sampled_from(list(Kind)),
        st.text(max_size=20),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.lists(st.binary(max_size=300), max_size=4),
    ),
    max_size=6,
)


def feed(cutter: Cutter, data: bytes, sizes: list[int]) -> list[tuple[object, ...]]:
    out: list[tuple[object, ...]] = []
    at, turn = 0, 0
    while at < len(data):
        room = cutter.room()
        assert len(room) > 0
        n = min(len(room), len(data) - at, sizes[turn % len(sizes)])
        room[:n] = data[at : at + n]
        at, turn = at + n, turn + 1
        for frame, lengths, body in cutter.fill(n):
            segments, start = [], 0
            for length in lengths:
                segments.append(bytes(body[start : start + length]))
                start += length
            out.append((frame.kind, frame.name, frame.rank, frame.number, segments))
    return out


@given(_FRAMES, st.lists(st.integers(1, 700), min_size=1, max_size=8), st.sampled_from([64, 100, 1 << 16]))
def test_frames_survive_any_cutting(
    frames: list[tuple[Kind, str, int, int, list[bytes]]], sizes: list[int], chunk: int
) -> None:
    data = b"".join(
        encode_head(kind, name=name, rank=rank, number=number, lengths=[len(s) for s in segments]) + b"".join(segments)
        for kind, name, rank, number, segments in frames
    )
    assert feed(Cutter(chunk), data, sizes) == frames


def test_a_head_larger_than_the_chunk() -> None:
    segments = [b"x"] * 500
    data = encode_head(Kind.CALL, lengths=[1] * 500) + b"".join(segments)
    assert feed(Cutter(128), data * 3, [50]) == [(Kind.CALL, "", 0, 0, segments)] * 3


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 64, b"\xff" * 64, b"det_core" * 8])
def test_foreign_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        feed(Cutter(), data, [7])


@pytest.mark.parametrize("lengths", [[UNTRUSTED_LIMIT + 1], [1 << 40], [1] * 10_000, [IN_FILE | 5, UNTRUSTED_LIMIT]])
def test_a_stranger_cannot_ask_for_much_memory(lengths: list[int]) -> None:
    with pytest.raises(BadFrame):
        feed(Cutter(limit=UNTRUSTED_LIMIT), encode_head(Kind.HELLO, lengths=lengths), [64])


def test_a_name_may_not_be_longer_than_a_frame_allows() -> None:
    with pytest.raises(ValueError, match="600"):
        encode(Kind.POST, name="t" * 600)
