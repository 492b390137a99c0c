"""What travels beside collectives: messages, the end of a job, goodbyes; and that closing leaves nothing behind."""

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
from det_core.ipc import Links
from det_core.ipc._membership import Membership, Trouble
from support.processes import free_port, until
from support.ranks import running

AsRanks = Callable[..., Any]


class Mail:
    """A handler that keeps what it is given."""

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


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"machines": 2, "secret": "s"}])
def test_posts_go_to_the_chief_and_from_it_to_one_or_all(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    def work(links: Links) -> Any:
        star, mail = links.everyone, Mail()
        star.subscribe("news", mail)
        if star.rank:
            star.post("news", {"from": star.rank})
            got = mail.wait(2 if star.rank == 2 else 1)
        else:
            got = mail.wait(3)
            star.post("news", "all")
            star.post("news", "one", to=2)
        links.lane("user").allgather(0)
        return got

    chief, *workers = as_ranks(4, work, **arguments).values()
    assert chief == [(r, {"from": r}) for r in (1, 2, 3)]
    assert workers == [[(0, "all")], [(0, "all"), (0, "one")], [(0, "all")]]


def test_posts_come_in_order_and_wait_for_a_subscriber(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        star, mail = links.everyone, Mail()
        if star.rank == 0:
            for number in range(500):
                star.post("late", number)
            links.lane("user").allgather(0)
            return None
        links.lane("user").allgather(0)
        star.subscribe("late", mail)
        mail.wait(500)
        return [message for _, message in mail.got]

    assert as_ranks(2, work).values()[1] == list(range(500))


def test_a_handler_that_fails_is_trouble_for_the_caller(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        star = links.everyone
        star.subscribe("bad", lambda _rank, message: 1 // message)
        links.lane("user").allgather(0)
        if star.rank:
            star.post("bad", 0)
        while True:
            links.lane("user").allgather(1)

    for outcome in as_ranks(2, work):
        assert isinstance(outcome, DistributedError) and "ZeroDivisionError" in str(outcome)


def test_call_soon_from_a_signal_handler_in_the_middle_of_everything(as_ranks: AsRanks) -> None:
    ran: list[int] = []

    def work(links: Links) -> Any:
        return [links.lane("user").allgather(turn) for turn in range(300)]

    stars: list[Any] = []

    def handler(_number: int, _frame: Any) -> None:
        if stars:
            stars[0].call_soon(lambda: ran.append(1))

    def work_and_tell(links: Links) -> Any:
        stars.append(links.everyone)
        try:
            return work(links)
        finally:
            stars.remove(links.everyone)

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        assert len(as_ranks(2, work_and_tell).values()[1]) == 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("ender", [0, 2])
@pytest.mark.parametrize("arguments", [{}, {"machines": 2, "secret": "s"}])
def test_the_end_of_a_job_ends_every_other_rank_with_status_0(
    as_ranks: AsRanks, ender: int, arguments: dict[str, Any]
) -> None:
    """Rank 1 waits in a collective, rank 3 computes, the rest are between calls."""

    def work(links: Links) -> Any:
        star, lane = links.everyone, links.lane("user")
        troubled = threading.Event()
        star.on_trouble(troubled.set)
        lane.allgather(0)
        if star.rank == ender:
            star.end_job("invalid_hp", "a learning rate of 10")
            return "ended it"
        if star.rank == 1:
            return lane.allgather(1)
        assert troubled.wait()
        if star.rank == 3:
            return links.lane("another").broadcast(1)
        return star.raise_if_broken()

    for rank, outcome in enumerate(as_ranks(4, work, **arguments)):
        if rank == ender:
            assert outcome == "ended it"
        else:
            assert isinstance(outcome, SystemExit) and outcome.code == 0


def test_on_trouble_after_the_fact_is_called_at_once(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        if links.everyone.rank == 1:
            return links.everyone.end_job("x", "y")
        with pytest.raises(SystemExit):
            while True:
                links.everyone.raise_if_broken()
                time.sleep(0.01)
        called = threading.Event()
        links.everyone.on_trouble(called.set)
        return called.wait()

    assert as_ranks(2, work).values()[0] is True


def test_trouble_that_is_being_told_reaches_a_star_that_is_made_meanwhile(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        star, local, done = links.everyone, Membership(0, [0]), threading.Event()

        def meanwhile() -> None:  # on the ipc thread, which publishes it afterwards
            star.break_off(Trouble("lost", "rank 7 died"), wait=False)
            star.share_trouble(local)
            done.set()

        star.call_soon(meanwhile)
        done.wait()
        until(lambda: local.trouble is not None)
        local.loop.stop()
        return local.trouble

    assert {trouble.text for trouble in as_ranks(2, work).values()} == {"rank 7 died"}


def test_farewells_are_seen_by_everybody_who_is_still_there(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        star = links.everyone
        links.lane("user").allgather(0)
        if star.rank == 1:
            links.close(farewell={"calls": 7})
            return None
        until(lambda: 1 in star.departed())
        seen = star.departed()[1]
        star.raise_if_broken()
        links.lane("user").broadcast(star.rank)  # nobody needs rank 1 for this
        return seen

    assert as_ranks(3, work).values() == [{"calls": 7}, None, {"calls": 7}]


def test_closing_twice_and_from_several_threads(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        threads = [threading.Thread(target=links.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        links.close()
        return [t.is_alive() for t in threads]

    assert as_ranks(3, work).values() == [[False] * 3] * 3


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"machines": 2, "secret": "s"}])
def test_closing_leaves_no_thread_no_descriptor_and_no_file(
    as_ranks: AsRanks, arguments: dict[str, Any], short_folder: Path
) -> None:
    """Also after an error: the ranks disagree in the end."""
    as_ranks(4, lambda links: links.lane("user").allgather(0), **arguments).values()
    descriptors, threads = os.listdir("/proc/self/fd"), threading.enumerate()
    for turn in range(3):

        def work(links: Links, wrong: int = turn) -> Any:
            lane = links.lane("user")
            lane.allgather(bytes(2_000_000))
            links.local_lane("checkpoint").allgather(0)
            return lane.gather(1) if links.everyone.rank == wrong else lane.broadcast(1)

        as_ranks(4, work, **arguments)
    assert threading.enumerate() == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert [p for p in short_folder.rglob("*") if not p.is_dir()] == []


def test_a_post_on_a_closed_star(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        links.close()
        with pytest.raises(ContextClosed):
            links.everyone.post("t", 1)
        with pytest.raises(ContextClosed):
            links.everyone.end_job("t", "r")

    as_ranks(2, work).values()


def test_a_handler_that_answers_while_its_star_closes(as_ranks: AsRanks) -> None:
    """The question came before the goodbye was seen: no trouble for anybody."""

    def work(links: Links) -> Any:
        star, closing = links.everyone, threading.Event()

        def late() -> None:
            assert closing.wait()
            deadline = time.monotonic() + 0.3
            while star.trouble is None and time.monotonic() < deadline:
                time.sleep(0.005)
            star.post("answers", "here")

        if star.rank == 1:
            star.call_soon(late)
            closing.set()
            links.close()
            return None
        mail = Mail()
        star.subscribe("answers", mail)
        until(lambda: 1 in star.departed())
        answers = mail.wait(1)
        star.raise_if_broken()
        return answers

    assert as_ranks(2, work).values()[0] == [(1, "here")]


def test_a_posted_message_that_cannot_be_pickled_raises_there(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        with pytest.raises(TypeError):
            links.everyone.post("t", threading.Lock())
        return links.lane("user").allgather(1)

    assert as_ranks(2, work).values() == [[1, 1]] * 2


def test_ranks_that_the_end_of_a_job_reaches_exit_with_0(tmp_path: Path) -> None:
    """As under a launcher: four processes, one ends the job, the others are anywhere."""
    script = """
        import os, time
        from det_core.ipc import connect
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        links = connect(rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1,
                        chief_ip=None, port=int(os.environ["PORT"]))
        lane = links.lane("user")
        lane.allgather(0)
        if rank == 2:
            links.everyone.end_job("invalid_hp", "bad")
            links.close()
        elif rank == 3:
            while True:
                links.everyone.raise_if_broken()
                time.sleep(0.001)
        else:
            lane.gather(1)
    """
    with running(script, 4, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0, 0, 0]


def test_a_lost_rank_is_lost_for_every_lane_and_for_checks(as_ranks: AsRanks) -> None:
    all_have_it, seen = threading.Barrier(3), threading.Barrier(3)

    def work(links: Links) -> Any:
        star = links.everyone
        links.lane("user").allgather(0)
        all_have_it.wait()  # or the loss may overtake what the slowest is still to get
        if star.rank == 1:
            star.peers[0].control.sock.shutdown(2)  # type: ignore[attr-defined]
            seen.wait()
            return None
        for call in (
            star.raise_if_broken,
            lambda: links.lane("x").broadcast(1),
            lambda: links.lane("user").allgather(1),
        ):
            with pytest.raises(PeerLost, match="rank 1 "):
                while True:
                    call()
                    time.sleep(0.01)
        seen.wait()

    outcomes = as_ranks(3, work)
    assert outcomes[0] is None and outcomes[2] is None


@pytest.mark.parametrize("arguments", [{}, {"force_tcp": True, "secret": "s"}, {"machines": 2, "secret": "s"}])
def test_ranks_that_close_in_any_order_are_not_taken_for_dead(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    """The chief says goodbye first; those whom it does not reach in time still have something to do on their own."""

    def work(links: Links) -> Any:
        lane, rank = links.lane("user"), links.everyone.rank
        lane.broadcast(rank)
        if rank > 1:
            time.sleep(0.05)
        links.everyone.raise_if_broken()
        return links.local_lane("user").broadcast(rank) if rank < 2 or arguments.get("machines") else None

    for _ in range(10):
        as_ranks(4, work, **arguments).values()
