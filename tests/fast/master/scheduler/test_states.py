"""States: which of them end, and what an order to stop makes of them."""

from __future__ import annotations

from det_core.master.scheduler import State

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
