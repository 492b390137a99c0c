"""Outcome of a job: root cause, exit status, summary."""

from __future__ import annotations

import signal

import pytest

from det_core.launch._outcome import RankOutcome, exit_status, failures, lost_peer, summary


def rank(number: int | None, status: int | None, ended: float = 1.0, **more: object) -> RankOutcome:
    return RankOutcome(number, pid=200 + (number or 0), status=status, ended=ended, host="h", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "status"),
    [
        ([rank(0, 0), rank(1, 0)], 0),
        ([rank(0, 1, 3.0), rank(1, 7, 2.0), rank(2, 0)], 7),
        ([rank(0, 1, 3.0), rank(1, -9, 2.0)], 137),
        ([rank(0, 0), rank(1, -15)], 143),
        ([rank(0, 0), rank(1, None)], 137),
        ([rank(0, 0), rank(None, 1)], 1),
    ],
)
def test_exit_status_is_the_root_causes(ranks: list[RankOutcome], status: int) -> None:
    assert exit_status(ranks) == status


def test_summary_begins_with_the_first_failure_and_its_last_lines() -> None:
    ranks = [rank(0, 1, 3.0, tail=b"later\n"), rank(1, 0), rank(2, -9, 2.0, tail=b"[rank=2] oh\n[rank=2] no\n")]
    assert summary(ranks, tail=1) == [
        ("rank 2 (pid 202, host h) failed first, killed by SIGKILL; its last lines:", b"[rank=2] no\n"),
        ("rank 0 (pid 200, host h) failed with status 1", b""),
    ]
    assert summary(ranks, tail=0)[0] == ("rank 2 (pid 202, host h) failed first, killed by SIGKILL", b"")


def test_summary_of_ranks_ended_by_a_forwarded_signal_is_one_line() -> None:
    ranks = [rank(0, -15, tail=b"x\n"), rank(1, -15), rank(2, 0)]
    ((text, lines),) = summary(ranks, 20, stop=signal.SIGTERM)
    assert text.startswith("ranks 0, 1 ended by SIGTERM, which has no handler before the first should_preempt()")
    assert lines == b""
    assert summary([rank(0, -3)], 20, stop=signal.SIGQUIT) == [("rank 0 ended by SIGQUIT", b"")]


def test_summary_reports_lost_output() -> None:
    assert summary([rank(4, 0, lost=12)], 20) == [("rank 4: 12 bytes of its output could not be written", b"")]


def test_failures_put_a_lost_rank_before_its_peers() -> None:
    victims = [rank(0, 1, 1.0, peer=2), rank(1, 1, 1.1, peer=0)]
    culprit = rank(2, 5, 1.5, tail=b"boom\n")
    ranks = [*victims, culprit]
    assert [r.rank for r in failures(ranks)] == [2, 0, 1]
    assert exit_status(ranks) == 5
    (text, lines), *_ = summary(ranks, 20)
    assert text.startswith("rank 2") and lines == b"boom\n"
    assert [r.rank for r in failures(victims)] == [0, 1], "a peer that did not fail is not the cause"
    assert [r.rank for r in failures([rank(0, 1, 1.0, peer=1), rank(1, 1, 2.0, peer=0)])] == [0, 1], "each the other"


def test_failures_put_a_lost_node_before_peers_of_its_ranks() -> None:
    lost = rank(None, 1, 2.0, node=1, description="was lost: its launcher has died or does not answer")
    ranks = [rank(0, 3, 1.0, peer=2), lost]
    assert failures(ranks)[0] is lost
    assert summary(ranks, 20)[0][0] == "node 1 (h) was lost: its launcher has died or does not answer"
    assert failures([rank(0, 3, 1.0), lost])[0].rank == 0


def test_failure_of_a_rank_that_lost_a_peer_names_it() -> None:
    assert rank(0, 3, peer=2).failure == "failed with status 3, as it lost rank 2"
    assert rank(0, -9, peer=2).failure == "was killed by SIGKILL, as it lost rank 2"
    assert rank(2, 3).failure == "failed with status 3"


def test_lost_peer_is_the_last_one_in_the_output() -> None:
    tail = b"PeerLost: rank 1 (h, pid 7) is gone\nTraceback\ndet_core.errors.PeerLost: rank 12 (host h, pid 7) has\n"
    assert lost_peer(tail) == 12
    assert lost_peer(b"a PeerLost, they say\n") is None
