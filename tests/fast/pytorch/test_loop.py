"""The loop by itself: what comes next, for random schedules, with a stop at any moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from det_core.pytorch._loop import (
    AskStop,
    Batch,
    Checkpoint,
    Counters,
    Epoch,
    Outcome,
    Progress,
    Report,
    Schedule,
    Train,
    Validate,
    operation,
)


def run(
    counters: Counters, schedule: Schedule, length: int | None, *, handed_out: bool = False, policy: bool = False,
    stop_at: int | None = None, stop_ask: int | None = None,
) -> tuple[list[str], Outcome]:  # fmt: skip
    """Carry the actions out on the counters alone.

    Args:
        stop_at: a stop is agreed on after so many batches.
        stop_ask: the n-th question whether to stop is answered yes.
    """
    trace: list[str] = []
    actions = operation(counters, schedule, length, handed_out=handed_out)
    answer: Any = None
    asked = 0
    while True:
        try:
            action = actions.send(answer)
        except StopIteration as end:
            return trace, end.value
        answer = False
        if isinstance(action, Train):
            assert action.until > counters.batches_trained
            while counters.batches_trained < action.until and not answer:
                trace.append(f"b{counters.batches_trained}")
                counters.batches_trained += 1
                answer = counters.batches_trained == stop_at
        elif isinstance(action, Report):
            trace.append(f"R({counters.batches_trained})")
        elif isinstance(action, Progress):
            trace.append(f"progress({counters.batches_trained})")
        elif isinstance(action, Validate):
            counters.last_val = counters.batches_trained
            trace.append(f"V({counters.batches_trained})" + (" completed" if action.completes else ""))
            answer = policy
        elif isinstance(action, Checkpoint):
            counters.last_ckpt = counters.batches_trained
            trace.append(f"C({counters.batches_trained})")
        else:
            assert isinstance(action, AskStop)
            trace.append("stop?")
            asked += 1
            answer = asked == stop_ask


def test_the_trace_of_the_contract() -> None:
    schedule = Schedule(4, Batch(2), Batch(3), Batch(2))
    trace, outcome = run(Counters(), schedule, 5)
    assert trace == [
        "b0", "b1", "R(2)", "V(2)", "stop?", "progress(2)", "stop?", "b2", "R(3)", "C(3)", "stop?", "b3", "R(4)",
        "V(4)", "stop?", "progress(4)", "stop?", "b4", "R(5)", "progress(5)", "stop?", "V(5) completed", "C(5)",
    ]  # fmt: skip
    assert outcome is Outcome.COMPLETED


def test_it_is_not_asked_whether_to_stop_once_the_operation_is_complete() -> None:
    trace, outcome = run(Counters(), Schedule(None, Batch(2), Batch(2)), 2, handed_out=True, stop_ask=2)
    assert trace[2:] == ["R(2)", "progress(2)", "stop?", "V(2) completed", "C(2)"] and outcome is Outcome.COMPLETED


def test_case_11_two_operations() -> None:
    counters, schedule = Counters(), Schedule(None)
    first, _ = run(counters, schedule, 2, handed_out=True)
    second, _ = run(counters, schedule, 4, handed_out=True)
    assert [t for t in first + second if t[0] in "bV"] == ["b0", "b1", "V(2) completed", "b2", "b3", "V(4) completed"]


def test_case_15_a_stop_at_the_length_drops_the_validation_and_the_resume_makes_it() -> None:
    counters, schedule = Counters(), Schedule(None, Batch(2))
    trace, outcome = run(counters, schedule, 2, handed_out=True, stop_ask=1)
    assert trace[-2:] == ["stop?", "C(2)"] and outcome is Outcome.STOPPED and "V(2)" not in " ".join(trace)
    assert run(counters, schedule, 2, handed_out=True) == (["V(2) completed", "stop?"], Outcome.COMPLETED)


def test_case_16_a_stop_after_a_validation() -> None:
    counters = Counters()
    trace, outcome = run(counters, Schedule(None, Batch(2)), 4, stop_ask=1)
    assert trace == ["b0", "b1", "R(2)", "V(2)", "stop?", "C(2)"] and outcome is Outcome.STOPPED


def test_an_operation_that_is_handed_out_at_its_length_is_validated_again() -> None:
    done = Counters(batches_trained=2, last_val=2, last_ckpt=2)
    assert run(done, Schedule(None), 2, handed_out=True) == (["V(2) completed"], Outcome.COMPLETED)
    assert run(Counters(batches_trained=2, last_val=2, last_ckpt=2), Schedule(None), 2) == ([], Outcome.LEFT_OPEN)


def test_a_stop_between_boundaries_is_one_of_its_own() -> None:
    trace, _ = run(Counters(), Schedule(None, Batch(4)), 8, stop_at=3)
    assert trace == ["b0", "b1", "b2", "R(3)", "C(3)"]


units = st.one_of(
    st.none(), st.builds(Batch, st.integers(0, 7)), st.builds(Epoch, st.integers(0, 3)),
    st.builds(Batch, st.lists(st.integers(1, 20), max_size=4)),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    epoch=st.one_of(st.none(), st.integers(1, 6)), validation=units, checkpoint=units, report=units,
    length=st.integers(1, 20), stops=st.lists(st.integers(1, 20), max_size=4), asks=st.integers(0, 12),
    handed_out=st.booleans(), policy=st.booleans(),
)  # fmt: skip
def test_stopped_anywhere_and_resumed_it_is_the_straight_run(
    epoch: int | None, validation: Any, checkpoint: Any, report: Any, length: int, stops: list[int], asks: int,
    handed_out: bool, policy: bool,
) -> None:  # fmt: skip
    schedule = Schedule(epoch, validation, checkpoint, report)
    how: dict[str, Any] = {"handed_out": handed_out, "policy": policy}
    straight, outcome = run(Counters(), schedule, length, **how)
    assert outcome is Outcome.COMPLETED

    counters, trace = Counters(), []
    for stop in sorted(stops):
        done, ended = run(counters, schedule, length, stop_at=stop, stop_ask=asks or None, **how)
        trace += done
        assert counters.saved, "a stop leaves a checkpoint"
        if ended is not Outcome.STOPPED:
            break
    trace += run(counters, schedule, length, **how)[0]

    def only(letter: str, among: list[str]) -> list[str]:
        return [each.split()[0] for each in among if each.startswith(letter)]

    assert only("b", trace) == only("b", straight), "every batch once, in order"
    assert list(dict.fromkeys(only("V", trace))) == only("V", straight)
    assert set(only("R", straight)) <= set(only("R", trace))
    reported = [int(each[2:-1]) for each in only("R", trace)]
    assert reported == sorted(set(reported)), "no step is reported twice"


@settings(max_examples=200, deadline=None)
@given(epoch=st.one_of(st.none(), st.integers(1, 6)), unit=units, start=st.integers(0, 30), length=st.integers(1, 40))
def test_the_next_boundary_is_the_first_batch_at_which_something_is_due(
    epoch: int | None, unit: Any, start: int, length: int
) -> None:
    schedule = Schedule(epoch, unit)
    found = schedule.next_boundary(start, length)
    assert found > start
    assert not any(schedule.due(n, length) for n in range(start + 1, found) if n < length)
    assert found >= length or schedule.due(found, length)


def test_a_container_is_not_searched_to_the_end_of_a_long_training() -> None:
    asked = []

    class Asked:
        def __contains__(self, batches: object) -> bool:
            asked.append(batches)
            return False

    assert 100 < Schedule(None, Batch(Asked())).next_boundary(100, 10**9) < 10**5
    assert len(asked) < 10**5


def test_units() -> None:
    assert repr(Batch(3)) == "Batch(value=3)" and Batch(3) == Batch(3) != Epoch(3)
    for wrong in ("3", True, 1.5):
        with pytest.raises(TypeError, match="expected an integer, or a container"):
            Batch(wrong)  # type: ignore[arg-type]
