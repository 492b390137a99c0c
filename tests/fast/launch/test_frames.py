"""Packets between machines: whole again however the stream is cut; and what is handed over in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.launch._wrapper import _handed
from det_core.launch._wrapper._frames import CLOSE, MESSAGE, OUT, Frames, frame

PACKETS = st.lists(st.tuples(st.sampled_from([MESSAGE, OUT, CLOSE]), st.integers(0, 2**32 - 1), st.binary()))


@given(PACKETS, st.lists(st.integers(1, 40), min_size=1))
def test_packets_come_out_as_they_went_in(packets: list[tuple[bytes, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame(*packet) for packet in packets)
    frames, found, place, turn = Frames(), [], 0, 0
    while place < len(stream):
        size = cuts[turn % len(cuts)]
        found += frames.feed(stream[place : place + size])
        place, turn = place + size, turn + 1
    assert found == packets


def test_what_is_handed_over_is_taken_as_it_is(tmp_path: Path) -> None:
    variables = {"A": "b=c\nd", "E": "", "É": "ü"}
    (tmp_path / _handed.NAME).write_bytes(_handed.to_bytes(variables))
    assert _handed.handed(str(tmp_path)) == variables
    assert _handed.handed(str(tmp_path / "nowhere")) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / _handed.NAME
    path.write_bytes(b"DET_CORE_SECRET=theirs\0")
    os.chown(path, 4711, -1)
    with pytest.raises(PermissionError, match="another user's"):
        _handed.handed(str(tmp_path))
