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


DONE = trial(op_complete=True, closed=True)
GAVE_UP = trial(early_exit="INVALID_HP")
LATE = {"op_complete": True, "failed": True, "signalled": True}
ENDS = [
    (State.STOPPING_CANCELED, State.CANCELED, "canceled"),
    (State.STOPPING_KILLED, State.CANCELED, "canceled"),
    (State.STOPPING_COMPLETED, State.COMPLETED, "completed"),
    (State.STOPPING_ERROR, State.ERROR, "errored"),
]
TOLD = [K.PREEMPTED, K.KILLED, K.ABORTED]


@pytest.mark.parametrize(
    ("row", "facts", "kinds", "expected"),
    [
        *[("1", trial(state), OTHERS + OUTSIDE, over(end, reason)) for state, end, reason in ENDS],
        *[("1", trial(state), [K.FAILED], over(State.ERROR, "errored")) for state, _, _ in ENDS],
        *[("2", facts, OTHERS + OUTSIDE, over(State.COMPLETED, "completed")) for facts in (DONE, trial(stopped=True))],
        *[("2", facts, [K.FAILED], over(State.ERROR, "errored")) for facts in (DONE, trial(stopped=True))],
        ("2", trial(**LATE, closed=True), [K.PREEMPTED], over(State.ERROR, "errored")),
        ("2", trial(stopped=True, failed=True), [K.PREEMPTED], over(State.COMPLETED, "completed")),
        ("2, an operation left", trial(closed=True), [K.FAILED], again(2)),
        ("failed late", trial(**LATE), [K.PREEMPTED], Next(Step.WAIT, State.ACTIVE, 2)),
        ("failed late", trial(restarts=5, **LATE), [K.PREEMPTED], over(State.ERROR, "errored", restarts=6)),
        ("failed late", trial(State.PAUSED, **LATE), [K.PREEMPTED], Next(Step.WAIT, State.PAUSED, 1)),
        ("failed late", trial(failed=True, signalled=True), [K.PREEMPTED], again()),
        ("4", trial(restarts=5), [K.TRANSIENT], again(5)),
        ("4", trial(State.PAUSED), [K.TRANSIENT], Next(Step.WAIT, State.PAUSED, 1)),
        ("4", trial(restarts=5, lost=5), [K.TRANSIENT], again(5)),
        ("4, too many", trial(restarts=4, lost=6), [K.TRANSIENT], again(5)),
        ("4, too many", trial(restarts=5, lost=6), [K.TRANSIENT], over(State.ERROR, "errored", restarts=6)),
        ("refused", trial(restarts=0), [K.REFUSED], over(State.ERROR, "errored", restarts=0)),
        ("refused", trial(State.STOPPING_CANCELED), [K.REFUSED], over(State.CANCELED, "canceled")),
        ("5", trial(restarts=0), [K.FAILED, K.TERMINATED], again(1)),
        ("5", trial(restarts=4), [K.FAILED], again(5)),
        ("5", trial(restarts=5), [K.FAILED], over(State.ERROR, "errored", restarts=6)),
        ("5", trial(restarts=0, max_restarts=0), [K.FAILED], over(State.ERROR, "errored", restarts=1)),
        ("5", trial(State.PAUSED), [K.FAILED], Next(Step.WAIT, State.PAUSED, 2)),
        ("5", GAVE_UP, [K.FAILED], again(2)),
        ("6", trial(), [K.STOPPED], over(State.COMPLETED, "completed")),
        ("6", trial(State.PAUSED), [K.STOPPED], over(State.COMPLETED, "completed")),
        ("6", trial(op_complete=True), [K.STOPPED], over(State.COMPLETED, "completed")),
        ("7", GAVE_UP, OTHERS, over(State.COMPLETED, "invalid_hp")),
        ("7", trial(early_exit="USER_REQUESTED_STOP"), OTHERS, over(State.COMPLETED, "completed")),
        (
            "7, killed",
            trial(State.STOPPING_KILLED, early_exit="INVALID_HP"),
            [K.KILLED],
            over(State.CANCELED, "invalid_hp"),
        ),
        ("8", trial(signalled=True), TOLD, again()),
        ("8", trial(State.PAUSED, signalled=True), TOLD, Next(Step.WAIT, State.PAUSED, 1)),
        ("8", trial(op_complete=True), TOLD, Next(Step.WAIT, State.ACTIVE, 1)),
        ("8", trial(State.PAUSED, op_complete=True), TOLD, Next(Step.WAIT, State.PAUSED, 1)),
        ("8, without reason", trial(restarts=4), [K.PREEMPTED], again(5)),
        ("8, without reason", trial(restarts=5), [K.PREEMPTED], over(State.ERROR, "errored", restarts=6)),
        ("8", trial(restarts=5, signalled=True), [K.PREEMPTED], again(5)),
    ],
)
def test_after_exit_follows_the_table(row: str, facts: TrialFacts, kinds: list[K], expected: Next) -> None:
    assert {after_exit(facts, kind) for kind in kinds} == {expected}, f"row {row}"


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


STOPPING = {
    State.STOPPING_CANCELED: State.CANCELED,
    State.STOPPING_KILLED: State.CANCELED,
    State.STOPPING_COMPLETED: State.COMPLETED,
    State.STOPPING_ERROR: State.ERROR,
}


def test_state_is_terminal_stopping_or_neither() -> None:
    assert {state for state in State if state.stopping} == set(STOPPING)
    assert {state: state.end for state in State if state.stopping} == STOPPING
    assert {state for state in State if not state.stopping and not state.terminal} == {State.ACTIVE, State.PAUSED}
    assert not any(state.terminal for state in STOPPING)
    assert State.PAUSED.end is State.PAUSED
    assert f"STATE_{State.ACTIVE}" == "STATE_ACTIVE"


def test_order_to_stop_changes_no_end_that_was_decided_before() -> None:
    for order in STOPPING:
        assert State.ACTIVE.after_order(order) is State.PAUSED.after_order(order) is order
    assert State.STOPPING_CANCELED.after_order(State.STOPPING_KILLED) is State.STOPPING_KILLED
    for state in (State.STOPPING_COMPLETED, State.STOPPING_ERROR, State.STOPPING_KILLED):
        assert state.after_order(State.STOPPING_KILLED) is state
