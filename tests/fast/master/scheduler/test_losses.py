"""Losses in a row: what goes on counting, and what begins anew."""

from __future__ import annotations

from det_core.master.scheduler import ExitKind as K
from det_core.master.scheduler import Losses


def test_losses_from_the_same_checkpoint_add_up() -> None:
    losses = Losses()
    assert [losses.note(K.TRANSIENT, None) for _ in range(3)] == [1, 2, 3]
    assert [losses.note(kind, None) for kind in (K.KILLED, K.ABORTED, K.TRANSIENT)] == [3, 3, 4]


def test_a_new_checkpoint_or_an_end_of_its_own_begins_anew() -> None:
    losses = Losses()
    assert [losses.note(K.TRANSIENT, start) for start in (None, "a", "a", "b")] == [1, 1, 2, 1]
    for kind in (K.FAILED, K.TERMINATED, K.PREEMPTED, K.STOPPED):
        assert losses.note(kind, "b") == 0
        assert losses.note(K.TRANSIENT, "b") == 1
