"""What a job comes to."""

from __future__ import annotations

import signal

import pytest

from det_core.launch._supervisor._ranks import Outcome, Rank, exit_status, failures, summary


def rank(number: int, status: int | None, ended: float = 1.0, **more: object) -> Rank:
    return Rank(number, wrapper=100 + number, script=200 + number, status=status, ended=ended, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "outcome", "status"),
    [
        ([rank(0, 0), rank(1, 0)], Outcome(2), 0),
        ([rank(0, 1, 3.0), rank(1, 7, 2.0), rank(2, 0)], Outcome(3), 7),
        ([rank(0, 1, 3.0), rank(1, -9, 2.0)], Outcome(2), 137),
        ([rank(0, 0), rank(1, None, 2.0, wrapper_died=True)], Outcome(2), 137),
        ([rank(0, 0), rank(1, 0)], Outcome(2, stop=signal.SIGTERM), 0),
        ([rank(0, 0), rank(1, -15)], Outcome(2, stop=signal.SIGTERM), 143),
        ([], Outcome(2, stop=signal.SIGTERM), 143),
        ([], Outcome(0, stop=signal.SIGINT), 130),
        ([], Outcome(0, agent_error="port in use", agent_failed_at=1.0), 1),
        ([rank(0, 3, 1.0)], Outcome(1, agent_error="lost the store", agent_failed_at=2.0), 3),
        ([rank(0, -15, 3.0), rank(1, 0, 3.0)], Outcome(2, agent_error="killed", agent_failed_at=2.0), 1),
        ([rank(0, 0, 3.0)], Outcome(1, agent_error="killed", agent_failed_at=2.0), 1),
        ([rank(0, 0, 1.0)], Outcome(1, agent_error="exit barrier", agent_failed_at=2.0), 0),
        ([rank(0, 0)], Outcome(2), 1),
    ],
)
def test_exit_status(ranks: list[Rank], outcome: Outcome, status: int) -> None:
    assert exit_status(ranks, outcome) == status


def test_the_first_failure_comes_first_with_its_last_lines() -> None:
    ranks = [rank(0, 1, 3.0, tail=b"later\n"), rank(1, 0), rank(2, -9, 2.0, tail=b"[rank=2] oh\n")]
    (first, lines), (other, none) = summary(ranks, Outcome(3), tail=20)
    assert first.startswith("rank 2 (pid 202, host ")
    assert first.endswith(") failed first, killed by SIGKILL; its last lines:")
    assert (lines, none) == (b"[rank=2] oh\n", b"")
    assert other.startswith("rank 0 (pid 200") and other.endswith(" with status 1")


def test_what_ended_by_the_signal_it_was_sent_is_no_failure_to_show() -> None:
    ranks = [rank(0, -15, tail=b"x\n"), rank(1, -15), rank(2, 0)]
    assert summary(ranks, Outcome(3, stop=signal.SIGTERM), tail=20) == [("ranks 0, 1 ended by SIGTERM", b"")]


def test_output_that_could_not_be_written_is_told() -> None:
    assert summary([rank(4, 0, lost=12)], Outcome(1), 20) == [
        ("rank 4: 12 bytes of its output could not be written", b"")
    ]


def test_a_rank_that_ended_for_the_loss_of_another_does_not_come_before_it() -> None:
    tail = b"Traceback\ndet_core.errors.PeerLost: rank 2 (host h, pid 7) has closed its DistributedContext\n"
    victims = [rank(0, 1, ended=1.0, tail=tail), rank(1, 1, ended=1.1, tail=tail)]
    culprit = rank(2, 5, ended=1.5, tail=b"boom\n")
    ranks = [*victims, culprit]
    assert [r.rank for r in failures(ranks)] == [2, 0, 1]
    assert exit_status(ranks, Outcome(expected=3, agent_failed_at=1.2)) == 5
    (text, lines), *_ = summary(ranks, Outcome(expected=3), tail=20)
    assert text.startswith("rank 2") and lines == b"boom\n"
    assert [r.rank for r in failures(victims)] == [0, 1], "one that did not fail is not blamed"
