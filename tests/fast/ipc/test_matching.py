"""Who called what, as a state machine: in every interleaving, agreeing ranks agree and one that differs is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.ipc._frames import Call, Op
from det_core.ipc._matching import Disagreement, Roll

OPS = st.sampled_from([Op.gather, Op.allgather, Op.broadcast])


@given(st.lists(OPS, max_size=12), st.integers(1, 4), st.data())
def test_ranks_that_call_alike_never_disagree(calls: list[Op], workers: int, data: st.DataObject) -> None:
    roll, done, mine = Roll("user"), [0] * workers, 0
    while mine < len(calls) or any(d < len(calls) for d in done):
        turns = [w for w in range(workers) if done[w] < len(calls)] + ([-1] if mine < len(calls) else [])
        turn = data.draw(st.sampled_from(turns))
        if turn < 0:
            roll.enter(0, calls[mine])
            mine += 1
        else:
            current = roll.hear(turn + 1, calls[done[turn]], done[turn] + 1)
            assert current == (done[turn] + 1 >= mine)
            done[turn] += 1


@given(st.lists(OPS, min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_a_rank_that_calls_something_else_is_named(calls: list[Op], workers: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, len(calls) - 1))
    culprit = data.draw(st.integers(1, workers))
    other = data.draw(OPS.filter(lambda op: op is not calls[wrong]))
    roll = Roll("user")
    for number, op in enumerate(calls[:wrong], 1):
        roll.enter(0, op)
        for rank in range(1, workers + 1):
            roll.hear(rank, op, number)
    order = data.draw(st.permutations(range(workers + 1)))
    with pytest.raises(Disagreement) as caught:
        for rank in order:
            if rank == 0:
                roll.enter(0, calls[wrong])
            else:
                roll.hear(rank, other if rank == culprit else calls[wrong], wrong + 1)
    assert caught.value.calls[culprit] == Call("user", other, wrong + 1)
    assert f"rank {culprit} called {other.name} (call {wrong + 1})" in str(caught.value)


def test_what_is_over_does_not_count() -> None:
    roll = Roll("user")
    roll.enter(0, Op.broadcast)
    roll.enter(0, Op.gather)
    assert not roll.hear(1, Op.allgather, 1)
    assert roll.hear(1, Op.gather, 2)


def test_the_roll_remembers_only_what_is_not_over() -> None:
    roll = Roll("user")
    for number in range(1, 1000):
        roll.enter(0, Op.gather)
        roll.hear(1, Op.gather, number)
    assert len(roll._names) == 1
    assert str(roll.last(1)) == "gather (call 999)"
