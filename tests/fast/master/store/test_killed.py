"""kill -9 in the middle of group commits: everything that was answered is there, and nothing is half there."""

from __future__ import annotations

from support.store_kills import kill_and_look


def test_what_was_answered_survives_kill_9(empty_url: str) -> None:
    kill_and_look(empty_url, 10, seed=1)
