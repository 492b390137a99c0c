"""Classification of exits: each row of the table of section 13.3."""

from __future__ import annotations

import itertools

import pytest

from det_core.master.scheduler import ExitFacts, ExitKind, Failure, ProcessExit, classify

CLEAN, BAD, BY_SIGNAL = ProcessExit(0), ProcessExit(1), ProcessExit(signal=9)
CRASHED = ProcessExit(signal=11)
GOOD_DAEMON, BAD_DAEMON = ProcessExit(0, daemon=True), ProcessExit(1, daemon=True)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        # 1: the master killed it, whatever else is known of it
        (ExitFacts(killed=True, exits=[BY_SIGNAL]), ExitKind.KILLED),
        (ExitFacts(killed=True, acked=True, exits=[CLEAN]), ExitKind.KILLED),
        (ExitFacts(killed=True, failure=Failure.LOST), ExitKind.KILLED),
        # 2: it acknowledged
        (ExitFacts(acked=True, exits=[CLEAN]), ExitKind.PREEMPTED),
        (ExitFacts(acked=True, exits=[BAD]), ExitKind.PREEMPTED),
        (ExitFacts(acked=True, exits=[BY_SIGNAL]), ExitKind.PREEMPTED),
        (ExitFacts(acked=True, preemptible=False, exits=[BAD]), ExitKind.FAILED),
        # 3: it ended by itself, cleanly
        (ExitFacts(exits=[CLEAN]), ExitKind.STOPPED),
        (ExitFacts(exits=[CLEAN, CLEAN, GOOD_DAEMON]), ExitKind.STOPPED),
        (ExitFacts(exits=[GOOD_DAEMON]), ExitKind.STOPPED),
        # 4: only helpers failed, after the others had ended
        (ExitFacts(exits=[CLEAN, BAD_DAEMON]), ExitKind.STOPPED),
        # 5: a failure
        (ExitFacts(exits=[BAD]), ExitKind.FAILED),
        (ExitFacts(exits=[CLEAN, BAD]), ExitKind.FAILED),
        (ExitFacts(exits=[CRASHED]), ExitKind.FAILED),
        (ExitFacts(exits=[BY_SIGNAL]), ExitKind.TERMINATED),
        (ExitFacts(exits=[CLEAN, BY_SIGNAL]), ExitKind.TERMINATED),
        (ExitFacts(exits=[BAD, BY_SIGNAL]), ExitKind.FAILED),
        (ExitFacts(exits=[BAD_DAEMON]), ExitKind.FAILED),
        (ExitFacts(exits=[ProcessExit()]), ExitKind.FAILED),  # nobody knows how
        (ExitFacts(failure=Failure.LOST), ExitKind.TRANSIENT),
        (ExitFacts(exits=[CLEAN], failure=Failure.LOST), ExitKind.TRANSIENT),
        (ExitFacts(failure=Failure.NOT_RESTORED), ExitKind.TRANSIENT),
        (ExitFacts(failure=Failure.NOT_STARTED), ExitKind.TRANSIENT),
        (ExitFacts(failure=Failure.REFUSED), ExitKind.UNRECOVERABLE),
        # 6: nothing ever ran
        (ExitFacts(), ExitKind.ABORTED),
    ],
)
def test_the_table(facts: ExitFacts, kind: ExitKind) -> None:
    assert classify(facts) is kind


def test_only_failures_are_errors() -> None:
    errors = {ExitKind.FAILED, ExitKind.TERMINATED, ExitKind.TRANSIENT, ExitKind.UNRECOVERABLE}
    assert {kind for kind in ExitKind if kind.is_error} == errors


def test_every_combination_has_a_kind_and_clean_ends_are_no_errors() -> None:
    for killed, acked, failure in itertools.product([True, False], [True, False], [None, *Failure]):
        for exits in ([], [CLEAN], [BAD], [CLEAN, BAD_DAEMON]):
            kind = classify(ExitFacts(killed, acked, True, exits, failure))
            assert kind.is_error == (not killed and not acked and (failure is not None or exits == [BAD]))
