"""Communicators beside collectives: messages, the end of a job, departures, and a close that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import ContextClosed, DistributedError, PeerLost
from det_core.ipc import Communicators
from det_core.ipc._membership import AbortReason, Membership
from support.processes import free_port, until
from support.ranks import running

AsRanks = Callable[..., Any]


class Mail:
    """Handler that records its messages."""

    def __init__(self) -> None:
        self.got: list[tuple[int, Any]] = []
        self._more = threading.Condition()

    def __call__(self, rank: int, message: Any) -> None:
        with self._more:
            self.got.append((rank, message))
            self._more.notify_all()

    def wait(self, count: int) -> list[tuple[int, Any]]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.got) >= count), self.got
            return sorted(self.got)


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"nodes": 2, "secret": "s"}])
def test_posts_reach_the_chief_and_from_it_one_or_all(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    def work(communicators: Communicators) -> Any:
        communicator, mail = communicators.all_ranks, Mail()
        communicator.subscribe("news", mail)
        if communicator.rank:
            communicator.post("news", {"from": communicator.rank})
            got = mail.wait(2 if communicator.rank == 2 else 1)
        else:
            got = mail.wait(3)
            communicator.post("news", "all")
            communicator.post("news", "one", to=2)
        communicators.channel("user").allgather(0)
        return got

    chief, *workers = as_ranks(4, work, **arguments).values()
    assert chief == [(r, {"from": r}) for r in (1, 2, 3)]
    assert workers == [[(0, "all")], [(0, "all"), (0, "one")], [(0, "all")]]


def test_posts_before_subscribe_are_delivered_in_order(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        communicator, mail = communicators.all_ranks, Mail()
        if communicator.rank == 0:
            for number in range(500):
                communicator.post("late", number)
            communicators.channel("user").allgather(0)
            return None
        communicators.channel("user").allgather(0)
        communicator.subscribe("late", mail)
        mail.wait(500)
        return [message for _, message in mail.got]

    assert as_ranks(2, work).values()[1] == list(range(500))


def test_handler_that_raises_aborts_all_ranks(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        communicator = communicators.all_ranks
        communicator.subscribe("bad", lambda _rank, message: 1 // message)
        communicators.channel("user").allgather(0)
        if communicator.rank:
            communicator.post("bad", 0)
        while True:
            communicators.channel("user").allgather(1)

    for outcome in as_ranks(2, work):
        assert isinstance(outcome, DistributedError) and "ZeroDivisionError" in str(outcome)


def test_call_soon_in_a_signal_handler_never_deadlocks(as_ranks: AsRanks) -> None:
    ran: list[int] = []

    def work(communicators: Communicators) -> Any:
        return [communicators.channel("user").allgather(turn) for turn in range(300)]

    opened: list[Any] = []

    def handler(_number: int, _frame: Any) -> None:
        if opened:
            opened[0].call_soon(lambda: ran.append(1))

    def work_and_tell(communicators: Communicators) -> Any:
        opened.append(communicators.all_ranks)
        try:
            return work(communicators)
        finally:
            opened.remove(communicators.all_ranks)

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        assert len(as_ranks(2, work_and_tell).values()[1]) == 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("ender", [0, 2])
@pytest.mark.parametrize("arguments", [{}, {"nodes": 2, "secret": "s"}])
def test_end_job_raises_system_exit_on_every_other_rank(
    as_ranks: AsRanks, ender: int, arguments: dict[str, Any]
) -> None:
    """Rank 1 waits in a collective, rank 3 computes, the rest are between calls."""

    def work(communicators: Communicators) -> Any:
        communicator, channel = communicators.all_ranks, communicators.channel("user")
        troubled = threading.Event()
        communicator.on_abort(troubled.set)
        channel.allgather(0)
        if communicator.rank == ender:
            communicator.end_job("invalid_hp", "a learning rate of 10")
            return "ended it"
        if communicator.rank == 1:
            return channel.allgather(1)
        assert troubled.wait()
        if communicator.rank == 3:
            return communicators.channel("another").broadcast(1)
        return communicator.raise_if_aborted()

    for rank, outcome in enumerate(as_ranks(4, work, **arguments)):
        if rank == ender:
            assert outcome == "ended it"
        else:
            assert isinstance(outcome, SystemExit) and outcome.code == 0


def test_on_abort_after_an_abort_is_called_at_once(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        if communicators.all_ranks.rank == 1:
            return communicators.all_ranks.end_job("x", "y")
        with pytest.raises(SystemExit):
            while True:
                communicators.all_ranks.raise_if_aborted()
                time.sleep(0.01)
        called = threading.Event()
        communicators.all_ranks.on_abort(called.set)
        return called.wait()

    assert as_ranks(2, work).values()[0] is True


def test_abort_reaches_a_communicator_made_before_it_is_published(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        communicator, local, done = communicators.all_ranks, Membership(0, [0]), threading.Event()

        def abort() -> None:  # on the ipc thread, which publishes the reason afterwards
            communicator.abort(AbortReason("lost", "rank 7 died"), wait=False)
            communicator.forward_aborts_to(local)
            done.set()

        communicator.call_soon(abort)
        done.wait()
        until(lambda: local.abort_reason is not None)
        local.loop.stop()
        return local.abort_reason

    assert {abort_reason.text for abort_reason in as_ranks(2, work).values()} == {"rank 7 died"}


def test_departed_has_the_exit_info_on_every_remaining_rank(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        communicator = communicators.all_ranks
        communicators.channel("user").allgather(0)
        if communicator.rank == 1:
            communicators.close(exit_info={"calls": 7})
            return None
        until(lambda: 1 in communicator.departed())
        seen = communicator.departed()[1]
        communicator.raise_if_aborted()
        communicators.channel("user").broadcast(communicator.rank)  # nobody needs rank 1 for this
        return seen

    assert as_ranks(3, work).values() == [{"calls": 7}, None, {"calls": 7}]


def test_close_in_several_threads_is_idempotent(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        threads = [threading.Thread(target=communicators.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        communicators.close()
        return [t.is_alive() for t in threads]

    assert as_ranks(3, work).values() == [[False] * 3] * 3


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"nodes": 2, "secret": "s"}])
def test_close_leaves_no_thread_no_descriptor_and_no_file(
    as_ranks: AsRanks, arguments: dict[str, Any], socket_dir: Path
) -> None:
    """Also after an error: the last calls of the ranks differ."""
    as_ranks(4, lambda communicators: communicators.channel("user").allgather(0), **arguments).values()
    descriptors, threads = os.listdir("/proc/self/fd"), threading.enumerate()
    for turn in range(3):

        def work(communicators: Communicators, wrong: int = turn) -> Any:
            channel = communicators.channel("user")
            channel.allgather(bytes(2_000_000))
            communicators.local_channel("checkpoint").allgather(0)
            return channel.gather(1) if communicators.all_ranks.rank == wrong else channel.broadcast(1)

        as_ranks(4, work, **arguments)
    assert threading.enumerate() == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert [p for p in socket_dir.rglob("*") if not p.is_dir()] == []


def test_post_on_a_closed_communicator_raises(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        communicators.close()
        with pytest.raises(ContextClosed):
            communicators.all_ranks.post("t", 1)
        with pytest.raises(ContextClosed):
            communicators.all_ranks.end_job("t", "r")

    as_ranks(2, work).values()


def test_handler_that_posts_while_its_communicator_closes_is_served(as_ranks: AsRanks) -> None:
    """The post arrives before the goodbye, and no rank aborts."""

    def work(communicators: Communicators) -> Any:
        communicator, closing = communicators.all_ranks, threading.Event()

        def late() -> None:
            assert closing.wait()
            deadline = time.monotonic() + 0.3
            while communicator.abort_reason is None and time.monotonic() < deadline:
                time.sleep(0.005)
            communicator.post("answers", "here")

        if communicator.rank == 1:
            communicator.call_soon(late)
            closing.set()
            communicators.close()
            return None
        mail = Mail()
        communicator.subscribe("answers", mail)
        until(lambda: 1 in communicator.departed())
        answers = mail.wait(1)
        communicator.raise_if_aborted()
        return answers

    assert as_ranks(2, work).values()[0] == [(1, "here")]


def test_post_of_an_object_without_pickle_raises_at_the_sender(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        with pytest.raises(TypeError):
            communicators.all_ranks.post("t", threading.Lock())
        return communicators.channel("user").allgather(1)

    assert as_ranks(2, work).values() == [[1, 1]] * 2


def test_end_job_in_processes_exits_all_with_0(tmp_path: Path) -> None:
    """As under a launcher: four processes, one ends the job, the others are anywhere."""
    script = """
        import os, time
        from det_core.ipc import connect
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        communicators = connect(rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1,
                        chief_ip=None, port=int(os.environ["PORT"]))
        channel = communicators.channel("user")
        channel.allgather(0)
        if rank == 2:
            communicators.all_ranks.end_job("invalid_hp", "bad")
            communicators.close()
        elif rank == 3:
            while True:
                communicators.all_ranks.raise_if_aborted()
                time.sleep(0.001)
        else:
            channel.gather(1)
    """
    with running(script, 4, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0, 0, 0]


def test_lost_rank_raises_on_every_channel_and_in_checks(as_ranks: AsRanks) -> None:
    all_have_it, seen = threading.Barrier(3), threading.Barrier(3)

    def work(communicators: Communicators) -> Any:
        communicator = communicators.all_ranks
        communicators.channel("user").allgather(0)
        all_have_it.wait()  # or the loss may overtake what the slowest is still to get
        if communicator.rank == 1:
            communicator.peers[0].control.sock.shutdown(2)  # type: ignore[attr-defined]
            seen.wait()
            return None
        for call in (
            communicator.raise_if_aborted,
            lambda: communicators.channel("x").broadcast(1),
            lambda: communicators.channel("user").allgather(1),
        ):
            with pytest.raises(PeerLost, match="rank 1 "):
                while True:
                    call()
                    time.sleep(0.01)
        seen.wait()

    outcomes = as_ranks(3, work)
    assert outcomes[0] is None and outcomes[2] is None


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"nodes": 2, "secret": "s"}])
def test_close_in_any_order_loses_no_rank(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    """The chief says goodbye first; those whom it does not reach in time still have something to do on their own."""

    def work(communicators: Communicators) -> Any:
        channel, rank = communicators.channel("user"), communicators.all_ranks.rank
        channel.broadcast(rank)
        if rank > 1:
            time.sleep(0.05)
        communicators.all_ranks.raise_if_aborted()
        return communicators.local_channel("user").broadcast(rank) if rank < 2 or arguments.get("nodes") else None

    for _ in range(10):
        as_ranks(4, work, **arguments).values()
