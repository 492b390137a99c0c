"""Which state may follow which."""

from __future__ import annotations

from det_core.master.scheduler import State, experiment_may, trial_may

S = State
ENDS = {S.COMPLETED, S.CANCELED, S.ERROR}
STOPPING = {S.STOPPING_CANCELED, S.STOPPING_KILLED, S.STOPPING_COMPLETED, S.STOPPING_ERROR}


def after(old: State, *, continued: bool = False) -> set[State]:
    return {new for new in S if new is not old and experiment_may(old, new, continued=continued)}


def test_the_table_of_experiments() -> None:
    assert after(S.ACTIVE) == {S.PAUSED} | STOPPING
    assert after(S.PAUSED) == {S.ACTIVE} | STOPPING
    assert after(S.STOPPING_CANCELED) == {S.STOPPING_KILLED, S.CANCELED, S.ERROR}
    assert after(S.STOPPING_KILLED) == {S.CANCELED, S.ERROR}
    assert after(S.STOPPING_COMPLETED) == {S.COMPLETED, S.ERROR}
    assert after(S.STOPPING_ERROR) == {S.ERROR}
    assert after(S.DELETING) == {S.DELETED, S.DELETE_FAILED}
    assert after(S.DELETE_FAILED) == {S.DELETING}
    assert after(S.DELETED) == set()


def test_only_continuing_brings_one_back() -> None:
    for end in ENDS:
        assert after(end) == {S.DELETING}
        assert after(end, continued=True) == {S.DELETING, S.ACTIVE, S.PAUSED}
        assert trial_may(end, S.ACTIVE, continued=True)
        assert not trial_may(end, S.ACTIVE)
    assert not experiment_may(S.DELETED, S.ACTIVE, continued=True)


def test_trials_end_by_themselves_and_are_not_deleted() -> None:
    for state in (S.ACTIVE, S.PAUSED):
        assert all(trial_may(state, end) for end in ENDS)
        assert not any(experiment_may(state, end) for end in ENDS)
    assert not any(trial_may(old, new) for old in S for new in (S.DELETING, S.DELETED, S.DELETE_FAILED))


def test_what_a_state_is() -> None:
    assert {s for s in S if s.stopping} == STOPPING
    assert {s for s in S if s.terminal} == ENDS | {S.DELETING, S.DELETED, S.DELETE_FAILED}
    assert {s: s.end for s in STOPPING} == {
        S.STOPPING_CANCELED: S.CANCELED,
        S.STOPPING_KILLED: S.CANCELED,
        S.STOPPING_COMPLETED: S.COMPLETED,
        S.STOPPING_ERROR: S.ERROR,
    }
    assert S.PAUSED.end is S.PAUSED
    assert f"STATE_{S.ACTIVE}" == "STATE_ACTIVE"
