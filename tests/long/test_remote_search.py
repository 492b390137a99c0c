"""A search whose machine is cut off for a minute while trials end, are killed, paused: the same record."""

from __future__ import annotations

from pathlib import Path

from support.remote_search import search_while_cut_off


def test_search_on_a_machine_that_is_cut_off_for_minutes_has_the_same_record(tmp_path: Path) -> None:
    search_while_cut_off(tmp_path, 60.0)
