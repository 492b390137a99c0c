"""Collectives among threads-as-ranks: results, arrays, disagreement, deadlines, bounds, channels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from det_core.errors import CollectiveMismatch, CollectiveTimeout, ContextClosed, DistributedError, PeerLost
from det_core.ipc import Communicators, _membership
from det_core.ipc._frames import Frame, Kind, Op
from support.processes import threads_in, until

AsRanks = Callable[..., Any]
MIB = 1 << 20  # minimum size of a memory file


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_collective_returns_its_result_in_order(as_ranks: AsRanks, size: int) -> None:
    def work(communicators: Communicators) -> Any:
        rank, channel = communicators.all_ranks.rank, communicators.channel("user")
        out = []
        for turn in range(3):
            out.append(
                (channel.gather((rank, turn)), channel.allgather({rank: turn}), channel.broadcast(f"{rank} {turn}"))
            )
        return out

    outcomes = as_ranks(size, work).values()
    for rank, out in enumerate(outcomes):
        for turn, (gathered, everywhere, broadcast) in enumerate(out):
            assert gathered == ([(r, turn) for r in range(size)] if rank == 0 else None)
            assert everywhere == [{r: turn} for r in range(size)]
            assert broadcast == f"0 {turn}"


@pytest.mark.parametrize("channel", ["user", "checkpoint"])
@pytest.mark.parametrize("size", [10, MIB // 16, MIB // 8, MIB])
def test_arrays_of_any_size_arrive_equal_writable_and_private(as_ranks: AsRanks, size: int, channel: str) -> None:
    def work(communicators: Communicators) -> Any:
        rank, on = communicators.all_ranks.rank, communicators.channel(channel)
        array = on.broadcast(np.arange(size, dtype=np.float64) if rank == 0 else None)
        array[0] = rank + 100
        everybody = on.allgather(np.full(size, rank))
        assert all(a.flags.writeable for a in everybody)
        everybody[0][0] += rank
        on.gather(None)
        return array[0], array[1:].sum(), [a[-1] for a in everybody], everybody[0][0]

    for rank, (first, rest, everybody, zero) in enumerate(as_ranks(3, work).values()):
        assert first == rank + 100
        assert rest == np.arange(size, dtype=np.float64)[1:].sum()
        assert everybody == [0, 1, 2]
        assert zero == rank


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}])
def test_arrays_in_the_stream_arrive_aligned(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    """However long the pickle before them, and the one before that."""

    def work(communicators: Communicators) -> None:
        channel = communicators.channel("user")
        for length in range(20):
            arrays = [np.full(9001 + i, i, np.float64) for i in range(3)]
            for text, received in channel.allgather(("x" * length, arrays)):
                assert text == "x" * length
                for i, array in enumerate(received):
                    assert array.ctypes.data % 16 == 0
                    assert array.shape == (9001 + i,) and set(array) == {i}

    as_ranks(3, work, **arguments).values()


def test_broadcast_array_changed_at_once_arrives_as_it_was(as_ranks: AsRanks) -> None:
    """Also when it had to be queued, because the receiver was busy."""
    sent = threading.Event()

    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        if communicators.all_ranks.rank == 0:
            array = np.zeros(20_000)
            for value in range(200):
                array[:] = value
                channel.broadcast(array)
            sent.set()
            return None
        until(lambda: sent.is_set() or threads_in("_wait_for_credit"))
        return [set(channel.broadcast(None)) for _ in range(200)]

    assert as_ranks(2, work).values()[1] == [{float(v)} for v in range(200)]


def test_gather_with_a_different_call_raises_mismatch_on_every_rank(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        channel.allgather(1)
        if communicators.all_ranks.rank == 2:
            return channel.broadcast(None)
        return channel.gather(0)

    for outcome in as_ranks(4, work):
        assert isinstance(outcome, CollectiveMismatch)
        assert "rank 2 called broadcast (call 2)" in str(outcome)
        assert "called gather (call 2)" in str(outcome)


def test_gather_while_chief_broadcasts_raises_mismatch_on_every_rank(as_ranks: AsRanks) -> None:
    """The chief's broadcast has returned by then, so it learns of it in its next call."""

    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        if communicators.all_ranks.rank:
            return channel.gather(0)
        channel.broadcast(1)
        return channel.gather(0)

    outcomes = as_ranks(3, work)
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatch)
        assert "rank 0 called broadcast (call 1)" in str(outcome)


def test_waiting_workers_with_different_calls_raise_mismatch_without_the_chief(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel, rank = communicators.channel("user"), communicators.all_ranks.rank
        if rank:
            return channel.gather(0) if rank == 1 else channel.allgather(0)
        until(lambda: communicators.all_ranks.abort_reason is not None)
        return communicators.all_ranks.raise_if_aborted()

    assert all(isinstance(o, CollectiveMismatch) for o in as_ranks(3, work))


def test_object_without_pickle_raises_before_anything_is_sent(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        for call in (channel.gather, channel.allgather, *([] if communicators.all_ranks.rank else [channel.broadcast])):
            with pytest.raises((TypeError, AttributeError)):
                call(threading.Lock())
        return channel.allgather("still in step")

    assert as_ranks(3, work).values() == [["still in step"] * 3] * 3


class _Poison:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("unpickled")


def test_object_without_unpickle_raises_at_its_receivers_alone(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel, rank = communicators.channel("user"), communicators.all_ranks.rank
        try:
            channel.broadcast(_Poison() if rank == 0 else None)
            raised = False
        except ZeroDivisionError:
            raised = True
        return raised, channel.allgather(rank)

    assert as_ranks(3, work).values() == [(False, [0, 1, 2]), (True, [0, 1, 2]), (True, [0, 1, 2])]


def test_gather_past_its_timeout_raises_and_names_the_missing_rank(as_ranks: AsRanks) -> None:
    ended = threading.Barrier(3)

    def work(communicators: Communicators) -> Any:
        try:
            return communicators.all_ranks.rank == 2 or communicators.channel("user").gather(1, timeout=0.3)
        finally:
            ended.wait()

    chief, worker, _ = as_ranks(3, work)
    assert isinstance(chief, CollectiveTimeout) and "rank 2 " in str(chief)
    assert isinstance(worker, CollectiveTimeout | PeerLost)


def test_broadcast_without_a_timeout_uses_that_of_the_communicator(as_ranks: AsRanks) -> None:
    ended = threading.Barrier(2)

    def work(communicators: Communicators) -> Any:
        try:
            return communicators.all_ranks.rank and communicators.channel("user").broadcast(None)
        finally:
            ended.wait()

    outcome = as_ranks(2, work, timeout=0.4)[1]
    assert isinstance(outcome, CollectiveTimeout) and "broadcast (call 1)" in str(outcome)


def test_call_after_a_timeout_on_the_chief_raises_mismatch(as_ranks: AsRanks) -> None:
    given_up = threading.Event()

    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        if communicators.all_ranks.rank == 0:
            with pytest.raises(CollectiveTimeout):
                channel.gather(1, timeout=0.2)
            given_up.set()
            return channel.gather(2)
        if communicators.all_ranks.rank == 2:
            assert given_up.wait()
        return channel.gather(3)

    for outcome in as_ranks(3, work):
        assert isinstance(outcome, CollectiveMismatch) and "gave up gather (call 1)" in str(outcome)


@pytest.mark.parametrize("late", [0, 2])
def test_long_wait_warns_once_and_goes_on(
    as_ranks: AsRanks, late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One word on each rank that waits, of the rank that is missing wherever it is, and one when it is back."""
    monkeypatch.setattr(_membership, "WARN_AFTER", 0.2)

    def warnings_with(text: str) -> list[str]:
        return [message for message in caplog.messages if text in message]

    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        channel.allgather(0)
        if communicators.all_ranks.rank == late:
            until(lambda: len(warnings_with("has waited for")) == 2, lambda: caplog.text)
        return [channel.allgather(0), channel.allgather(1)]

    with caplog.at_level(logging.WARNING, "det_core.ipc"):
        assert as_ranks(3, work).values() == [[[0, 0, 0], [1, 1, 1]]] * 3
    for rank in {0, 1, 2} - {late}:
        (warning,) = warnings_with(f"rank {rank} in allgather (call 2) has waited for")
        assert f" s for rank {late} (" in warning and "last known call: allgather (call 1)" in warning
        (back,) = warnings_with(f"rank {rank} in allgather (call 2): rank {late} (")
        assert " responded after " in back
    assert len(caplog.messages) == 4


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}])
def test_sender_without_credit_waits_and_loses_nothing(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    bound, messages = 1 << 20, 60

    def work(communicators: Communicators) -> Any:
        communicator, channel = communicators.all_ranks, communicators.channel("user")
        if communicator.rank == 0:
            most = 0
            for number in range(messages):
                channel.broadcast((number, bytes(100_000 if number % 7 else 3_000_000)))
                most = max(most, *(p.in_flight for p in communicator.peers.values()))
            return most
        until(lambda: threads_in("_wait_for_credit"))
        return [channel.broadcast(None)[0] for _ in range(messages)]

    most, *received = as_ranks(3, work, max_in_flight=bound, **arguments).values()
    assert received == [list(range(messages))] * 2
    assert most <= 3_100_000  # the bound, or one message that is larger than it


def test_broadcast_waiting_for_credit_ignores_a_departed_rank(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel, rank = communicators.channel("user"), communicators.all_ranks.rank
        if rank == 0:
            for number in range(50):
                channel.broadcast((number, bytes(200_000)))
        elif rank == 1:
            until(lambda: threads_in("_wait_for_credit"))
            return [channel.broadcast(None)[0] for _ in range(50)]

    assert as_ranks(3, work, max_in_flight=1 << 20).values()[1] == list(range(50))


def test_channels_in_several_threads_are_independent(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        found: dict[str, Any] = {}

        def run(name: str, turns: int) -> None:
            channel = communicators.channel(name)
            found[name] = [channel.allgather((name, turn)) for turn in range(turns)]

        threads = [threading.Thread(target=run, args=(f"channel {i}", 30 * (i + 1)), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        run("user", 100)
        for thread in threads:
            thread.join()
        return found

    for found in as_ranks(3, work).values():
        assert len(found) == 5
        for name, out in found.items():
            assert out == [[(name, turn)] * 3 for turn in range(len(out))]


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}])
def test_channels_in_another_order_on_every_rank_deliver(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    """A large broadcast on one channel does not wait for the others' calls there while they wait on another channel."""
    size = 3_000_000

    def work(communicators: Communicators) -> Any:
        rank, names = communicators.all_ranks.rank, ["user", "checkpoint", "upload"]
        order = names[rank:] + names[:rank]
        if rank == 0:
            for name in order:
                communicators.channel(name).broadcast((name, bytes(size)))
            return None
        got = [(name, communicators.channel(name).broadcast(None)) for name in order]
        return all(sent == name and len(data) == size for name, (sent, data) in got)

    assert as_ranks(3, work, **arguments).values() == [None, True, True]


def test_call_on_a_closed_communicator_raises(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        communicators.close()
        with pytest.raises(ContextClosed):
            channel.allgather(1)
        with pytest.raises(ContextClosed):
            communicators.channel("other")
        with pytest.raises(ContextClosed):
            communicators.all_ranks.raise_if_aborted()

    as_ranks(2, work).values()


def test_close_ends_a_call_of_another_thread(as_ranks: AsRanks) -> None:
    ended = threading.Event()

    def work(communicators: Communicators) -> Any:
        if communicators.all_ranks.rank:
            return ended.wait()
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                communicators.channel("other").gather(1)
            except DistributedError as e:
                caught.append(e)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        until(lambda: threads_in("_receive"))
        communicators.close()
        thread.join()
        ended.set()
        return caught

    assert [type(e) for e in as_ranks(2, work).values()[0]] == [ContextClosed]


def test_call_that_requires_a_departed_rank_names_it_and_its_failure(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        channel.allgather(0)
        if communicators.all_ranks.rank == 1:
            communicators.close(failure=RuntimeError("the disk is gone"))
            return None
        return channel.allgather(1)

    for rank, outcome in enumerate(as_ranks(3, work)):
        if rank != 1:
            assert isinstance(outcome, PeerLost)
            assert "rank 1 " in str(outcome) and "RuntimeError: the disk is gone" in str(outcome)


def test_broadcasts_of_a_departed_chief_arrive(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        if communicators.all_ranks.rank == 0:
            for number in range(100):
                channel.broadcast(number)
            return None
        until(lambda: 0 in communicators.all_ranks.departed())
        return [channel.broadcast(None) for _ in range(100)]

    assert as_ranks(3, work).values()[1:] == [list(range(100))] * 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_local_collectives_reach_the_ranks_of_one_node(as_ranks: AsRanks, nodes: int) -> None:
    def work(communicators: Communicators) -> Any:
        local, user, rank = (
            communicators.local_channel("user"),
            communicators.channel("user"),
            communicators.all_ranks.rank,
        )
        return [(local.allgather(rank), local.gather(rank), user.allgather(rank), local.broadcast(rank)) for _ in "ab"]

    for rank, out in enumerate(as_ranks(4, work, nodes=nodes, secret="s").values()):
        mine = [0, 1, 2, 3] if nodes == 1 else [[0, 1], [2, 3]][rank // 2]
        assert out == [(mine, mine if rank == mine[0] else None, [0, 1, 2, 3], mine[0])] * 2


def test_mismatch_among_local_ranks_aborts_all_ranks(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        rank = communicators.all_ranks.rank
        if rank == 2:
            return communicators.local_channel("user").gather(0)
        if rank == 3:
            return communicators.local_channel("user").broadcast(0)
        return communicators.channel("user").allgather(0)

    for outcome in as_ranks(4, work, nodes=2, secret="s"):
        assert isinstance(outcome, CollectiveMismatch)
        assert "rank 3 called broadcast" in str(outcome) and "rank 2 called gather" in str(outcome)


def test_answer_about_a_call_that_the_chief_has_made_is_empty(as_ranks: AsRanks) -> None:
    """A starved chief may be slow to send the result, and a worker waits for that alone."""

    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        channel.allgather(0)
        channel.broadcast(0)
        answers = []
        for number, op in enumerate((Op.allgather, Op.broadcast), 1):
            asked = Frame(Kind.ASK, op, "user", rank=1, number=number)
            asked.segments = (b"broadcast()",)
            answers.append(channel.answer(asked))
        return answers

    for answer in as_ranks(3, work).values()[0]:
        assert answer.endswith(b'["", ""]'), answer
