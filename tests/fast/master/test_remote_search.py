"""A search whose trials run on a machine that is cut off from the master again and again has the same record."""

from __future__ import annotations

from pathlib import Path

from support.remote_search import search_while_cut_off


def test_search_on_a_machine_that_is_cut_off_has_the_same_record(tmp_path: Path) -> None:
    search_while_cut_off(tmp_path, 0.5)
