"""Two thousand flipped bits in a journal, at both doors."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.damaged_records import flip_bits


@pytest.mark.parametrize("door", ["shipped", "left behind"])
def test_two_thousand_flipped_bits_keep_nothing_from_ending(tmp_path: Path, door: str) -> None:
    flip_bits(tmp_path, door, 2000)
