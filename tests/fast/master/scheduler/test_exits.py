"""Ends of allocations: each row of the tables of sections 13.3 and 13.4, and losses in a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.master.scheduler import Cause, Losses, Next, State, Step, TrialFacts, after_exit, classify
from det_core.master.scheduler import ExitKind as K

OTHERS = [kind for kind in K if not kind.is_error]
OUTSIDE = [K.TERMINATED, K.TRANSIENT]


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"killed": True, "signal": 9}, K.KILLED),
        ({"killed": True, "acked": True, "status": 0}, K.KILLED),
        ({"killed": True, "cause": Cause.LOST}, K.KILLED),
        ({"acked": True, "status": 0}, K.PREEMPTED),
        ({"acked": True, "status": 1}, K.PREEMPTED),
        ({"acked": True, "signal": 9}, K.PREEMPTED),
        ({"cause": Cause.NOT_STARTED}, K.FAILED),
        ({"cause": Cause.NOT_STARTED, "tried": False}, K.ABORTED),
        ({"cause": Cause.REFUSED}, K.REFUSED),
        ({"cause": Cause.LOST}, K.TRANSIENT),
        ({"cause": Cause.LOST, "acked": True}, K.PREEMPTED),
        ({"cause": Cause.TAKEN, "signal": 15}, K.TRANSIENT),
        ({"cause": Cause.TIME, "signal": 15}, K.FAILED),
        ({"cause": Cause.TIME, "signal": 15, "saved": True}, K.TRANSIENT),
        ({"cause": Cause.MEMORY, "status": 137}, K.TERMINATED),
        ({"cause": Cause.MEMORY, "status": 0}, K.STOPPED),
        ({"cause": Cause.CANCELLED, "status": 1}, K.TERMINATED),
        ({"status": 0}, K.STOPPED),
        ({"status": 1}, K.FAILED),
        ({"signal": 11}, K.FAILED),
        ({}, K.FAILED),
        ({"signal": 9}, K.TERMINATED),
        ({"signal": 15}, K.TERMINATED),
    ],
)
def test_classify_goes_by_the_first_row_that_applies(facts: dict[str, Any], kind: K) -> None:
    assert classify(**{"cause": Cause.NONE, **facts}) is kind


def test_only_failures_are_errors() -> None:
    assert {kind for kind in K if kind.is_error} == {K.FAILED, K.REFUSED, *OUTSIDE}


def test_losses_from_the_same_checkpoint_add_up() -> None:
    losses = Losses()
    assert [losses.note(K.TRANSIENT, None) for _ in range(3)] == [1, 2, 3]
    assert [losses.note(kind, None) for kind in (K.KILLED, K.ABORTED, K.TRANSIENT)] == [3, 3, 4]


def test_losses_begin_anew_at_a_new_checkpoint_or_another_end() -> None:
    losses = Losses()
    assert [losses.note(K.TRANSIENT, start) for start in (None, "a", "a", "b")] == [1, 1, 2, 1]
    for kind in (K.FAILED, K.TERMINATED, K.PREEMPTED, K.STOPPED):
        assert losses.note(kind, "b") == 0
        assert losses.note(K.TRANSIENT, "b") == 1


def trial(state: State = State.ACTIVE, **more: object) -> TrialFacts:
    """Return a trial that has failed once, of five times that it may."""
    return TrialFacts(**{"state": state, "restarts": 1, "max_restarts": 5, **more})  # type: ignore[arg-type]


def again(restarts: int = 1, state: State = State.ACTIVE) -> Next:
    return Next(Step.ALLOCATE, state, restarts)


def over(state: State, reason: str, restarts: int = 1) -> Next:
    return Next(Step.END, state, restarts, reason)


@pytest.mark.parametrize(
    ("state", "end", "reason"),
    [
        (State.STOPPING_CANCELED, State.CANCELED, "canceled"),
        (State.STOPPING_KILLED, State.CANCELED, "canceled"),
        (State.STOPPING_COMPLETED, State.COMPLETED, "completed"),
        (State.STOPPING_ERROR, State.ERROR, "errored"),
    ],
)
def test_row_1_a_trial_that_is_to_end_ends(state: State, end: State, reason: str) -> None:
    for kind in OTHERS + OUTSIDE:
        assert after_exit(trial(state), kind) == over(end, reason)
    assert after_exit(trial(state), K.FAILED) == over(State.ERROR, "errored")


@pytest.mark.parametrize("facts", [trial(op_complete=True, closed=True), trial(stopped=True)])
def test_row_2_a_trial_that_its_search_is_done_with_ends(facts: TrialFacts) -> None:
    for kind in OTHERS + OUTSIDE:
        assert after_exit(facts, kind) == over(State.COMPLETED, "completed")
    assert after_exit(facts, K.FAILED) == over(State.ERROR, "errored")


def test_row_2_one_that_fails_after_its_last_operation_is_in_error() -> None:
    done = trial(op_complete=True, closed=True, failed=True, signalled=True)
    assert after_exit(done, K.PREEMPTED) == over(State.ERROR, "errored")
    assert after_exit(trial(stopped=True, failed=True), K.PREEMPTED) == over(State.COMPLETED, "completed")


def test_one_that_fails_after_an_operation_is_parked_and_counted() -> None:
    facts = {"op_complete": True, "failed": True, "signalled": True}
    assert after_exit(trial(**facts), K.PREEMPTED) == Next(Step.PARK, State.ACTIVE, 2)
    assert after_exit(trial(restarts=5, **facts), K.PREEMPTED) == over(State.ERROR, "errored", restarts=6)
    assert after_exit(trial(State.PAUSED, **facts), K.PREEMPTED) == Next(Step.PARK, State.PAUSED, 1)
    assert after_exit(trial(failed=True, signalled=True), K.PREEMPTED) == again()


def test_row_2_is_not_for_one_that_is_closed_with_an_operation_left() -> None:
    assert after_exit(trial(closed=True), K.FAILED) == again(2)


def test_row_4_a_fault_of_the_machine_is_not_counted() -> None:
    assert after_exit(trial(restarts=5), K.TRANSIENT) == again(5)
    assert after_exit(trial(State.PAUSED), K.TRANSIENT) == Next(Step.WAIT, State.PAUSED, 1)


def test_one_that_an_engine_refuses_is_not_tried_again() -> None:
    assert after_exit(trial(restarts=0), K.REFUSED) == over(State.ERROR, "errored", restarts=0)
    assert after_exit(trial(State.STOPPING_CANCELED), K.REFUSED) == over(State.CANCELED, "canceled")


def test_row_4_faults_of_the_machine_are_counted_once_they_are_too_many_in_a_row() -> None:
    assert after_exit(trial(restarts=5, lost=5), K.TRANSIENT) == again(5)
    assert after_exit(trial(restarts=4, lost=6), K.TRANSIENT) == again(5)
    assert after_exit(trial(restarts=5, lost=6), K.TRANSIENT) == over(State.ERROR, "errored", restarts=6)


def test_row_5_a_failure_is_counted_until_there_are_too_many() -> None:
    assert after_exit(trial(restarts=0), K.FAILED) == after_exit(trial(restarts=0), K.TERMINATED) == again(1)
    assert after_exit(trial(restarts=4), K.FAILED) == again(5)
    assert after_exit(trial(restarts=5), K.FAILED) == over(State.ERROR, "errored", restarts=6)
    assert after_exit(trial(restarts=0, max_restarts=0), K.FAILED) == over(State.ERROR, "errored", restarts=1)
    assert after_exit(trial(State.PAUSED), K.FAILED) == Next(Step.WAIT, State.PAUSED, 2)
    assert after_exit(trial(early_exit="INVALID_HP"), K.FAILED) == again(2)


def test_row_6_one_that_ends_by_itself_is_complete() -> None:
    for facts in (trial(), trial(State.PAUSED), trial(op_complete=True), trial(closed=True)):
        assert after_exit(facts, K.STOPPED) == over(State.COMPLETED, "completed")


def test_row_7_an_early_exit_is_complete_and_its_search_learns_why() -> None:
    for kind in OTHERS:
        assert after_exit(trial(early_exit="INVALID_HP"), kind) == over(State.COMPLETED, "invalid_hp")
        assert after_exit(trial(early_exit="USER_REQUESTED_STOP"), kind) == over(State.COMPLETED, "completed")
    killed = trial(State.STOPPING_KILLED, early_exit="INVALID_HP")
    assert after_exit(killed, K.KILLED) == over(State.CANCELED, "invalid_hp")


@pytest.mark.parametrize("kind", [K.PREEMPTED, K.KILLED, K.ABORTED])
def test_row_8_one_that_was_told_to_stop_goes_on_when_it_may(kind: K) -> None:
    assert after_exit(trial(signalled=True), kind) == again()
    assert after_exit(trial(State.PAUSED, signalled=True), kind) == Next(Step.WAIT, State.PAUSED, 1)
    assert after_exit(trial(op_complete=True), kind) == Next(Step.PARK, State.ACTIVE, 1)
    assert after_exit(trial(State.PAUSED, op_complete=True), kind) == Next(Step.PARK, State.PAUSED, 1)


def test_an_acknowledgement_without_reason_counts_as_a_restart() -> None:
    assert after_exit(trial(restarts=4), K.PREEMPTED) == again(5)
    assert after_exit(trial(restarts=5), K.PREEMPTED) == over(State.ERROR, "errored", restarts=6)
    assert after_exit(trial(restarts=5, signalled=True), K.PREEMPTED) == again(5)


@pytest.mark.parametrize("status", [0, 1])
def test_the_matrix_of_exit_code_and_acknowledgement(status: int) -> None:
    def then(facts: TrialFacts, *, acked: bool) -> Next:
        return after_exit(facts, classify(Cause.NONE, status, acked=acked))

    silent = then(trial(), acked=False)
    assert silent == (over(State.COMPLETED, "completed") if status == 0 else again(2))
    assert then(trial(State.PAUSED, signalled=True), acked=True) == Next(Step.WAIT, State.PAUSED, 1)
    assert then(trial(op_complete=True), acked=True) == Next(Step.PARK, State.ACTIVE, 1)
    assert then(trial(op_complete=True, closed=True), acked=True) == over(State.COMPLETED, "completed")
    assert then(trial(), acked=True) == again(2)


any_facts = st.builds(
    TrialFacts,
    state=st.sampled_from([State.ACTIVE, State.PAUSED, *(s for s in State if s.stopping)]),
    restarts=st.integers(0, 3),
    max_restarts=st.integers(0, 3),
    op_complete=st.booleans(),
    closed=st.booleans(),
    stopped=st.booleans(),
    signalled=st.booleans(),
    early_exit=st.sampled_from([None, "INVALID_HP", "USER_REQUESTED_STOP"]),
    failed=st.booleans(),
    lost=st.integers(0, 7),
)


@given(any_facts, st.sampled_from(list(K)))
def test_what_follows_is_possible(facts: TrialFacts, kind: K) -> None:
    after = after_exit(facts, kind)
    assert after.state is facts.state or after.state.terminal
    assert after.state.terminal == (after.step is Step.END) == (after.reason is not None)
    assert facts.restarts <= after.restarts <= facts.restarts + 1
    if after.step is Step.ALLOCATE:
        assert facts.state is State.ACTIVE and not facts.op_complete
        assert after.restarts <= max(facts.max_restarts, facts.restarts)
    if facts.state.stopping:
        assert after.step is Step.END


@given(any_facts, st.lists(st.sampled_from([kind for kind in K if kind is not K.TRANSIENT]), min_size=20))
def test_a_trial_that_nobody_stops_fails_only_so_often(facts: TrialFacts, kinds: list[K]) -> None:
    failures, restarts = 0, 0
    for kind in kinds:
        facts = trial(restarts=restarts, max_restarts=facts.max_restarts)
        after = after_exit(facts, kind)
        failures += kind in (K.FAILED, K.TERMINATED, K.PREEMPTED)
        if after.step is Step.END:
            break
        restarts = after.restarts
        assert failures == restarts <= facts.max_restarts
