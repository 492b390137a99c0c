"""How ranks of a machine find each other, and who is turned away without harm."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, RendezvousError
from det_core.ipc import Communicators, _membership, connect
from det_core.ipc._connect import RankConfig
from fast.ipc.conftest import CALL, HELLO, finish, frame, in_thread, started
from support.processes import until

AsRanks = Callable[..., Any]
ConfigOf = Callable[..., dict[str, Any]]
IS_IN = "for other ranks, as the chief does;"
"""Said by a worker that has been let in, at once where the tests set the time of the warning to 0."""


def door(folder: Path) -> str:
    """The socket below ``folder``, once the chief listens there."""
    found: list[Path] = []

    def listens() -> bool:
        found[:] = folder.rglob("*.sock")
        with socket.socket(socket.AF_UNIX) as visitor:
            return bool(found) and visitor.connect_ex(str(found[0])) == 0

    until(listens)
    return str(found[0])


def test_the_folder_is_this_users_alone_and_what_is_not_is_passed_over(
    rank_config: ConfigOf, tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, link = tmp_path / "taken", tmp_path / "link"
    name = f"det_core-{os.getuid()}"
    for parent in (taken, link):
        parent.mkdir()
    (taken / name).write_text("")
    (tmp_path / "elsewhere").mkdir()
    (link / name).symlink_to(tmp_path / "elsewhere")
    (short_folder / name).mkdir(mode=0o755)  # others could enter it
    bad = (str(taken), str(link), str(tmp_path / "missing"))
    monkeypatch.setattr("det_core.ipc._listener.SOCKET_DIRS", (*bad, str(short_folder)))
    chief = started(rank_config(0, 2))
    assert door(short_folder).startswith(f"{short_folder}/{name}/")
    entry = os.lstat(short_folder / name)
    assert entry.st_uid == os.getuid() and entry.st_mode & 0o777 == 0o700
    finish(chief, started(rank_config(1, 2)))
    monkeypatch.setattr("det_core.ipc._listener.SOCKET_DIRS", bad)
    with pytest.raises(RendezvousError, match="no private directory"):
        connect(**rank_config(0, 2))


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_waited_for_with_a_warning(
    rank_config: ConfigOf, late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_membership, "WARN_AFTER", 0.0)
    with caplog.at_level(logging.WARNING, "det_core.ipc"):
        others = [started(rank_config(r, 3)) for r in range(3) if r != late]
        until(lambda: (IS_IN if late else "no chief at") in caplog.text)
        assert all(t.is_alive() for t, _ in others)
        outcomes = finish(*others, started(rank_config(late, 3)))
    assert all(isinstance(o, Communicators) for o in outcomes), outcomes
    assert not late or re.search("rank 0 in the rendezvous has waited for 0 s for rank (1, )?2;", caplog.text)


def test_a_deadline_ends_the_rendezvous(rank_config: ConfigOf) -> None:
    chief, worker = finish(started(rank_config(0, 3, timeout=0.4)), started(rank_config(1, 3)))
    assert isinstance(chief, CollectiveTimeout) and "timed out after 0.4 s waiting for rank 2" in str(chief)
    assert isinstance(worker, PeerLost) and "CollectiveTimeout" in str(worker)
    (alone,) = finish(started(rank_config(1, 3, timeout=0.4)))
    assert isinstance(alone, CollectiveTimeout) and "no chief at" in str(alone)


def test_a_second_chief_is_told_who_is_there(rank_config: ConfigOf, short_folder: Path) -> None:
    first = started(rank_config(0, 2))
    door(short_folder)
    (second,) = finish(started(rank_config(0, 2)))
    assert isinstance(second, RendezvousError)
    assert "this process is already the chief" in str(second) and "pub_port" in str(second)
    assert all(isinstance(o, Communicators) for o in finish(first, started(rank_config(1, 2))))


def test_a_second_job_in_another_process_is_told_the_pid(
    rank_config: ConfigOf, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.ipc._listener._LOCK_TIMEOUT", 0.3)
    code = f"""
from det_core.ipc import _listener, connect
_listener.SOCKET_DIRS = ({str(short_folder)!r},)
connect(**{rank_config(0, 2)!r})"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as holder:
        try:
            path = door(short_folder)
            (outcome,) = finish(started(rank_config(0, 2)))
            assert isinstance(outcome, RendezvousError) and f"process {holder.pid} is already the chief" in str(outcome)
        finally:
            holder.kill()
    # its socket and its lock file are still there, but it is dead
    assert os.path.exists(path)
    assert all(isinstance(o, Communicators) for o in finish(started(rank_config(0, 2)), started(rank_config(1, 2))))
    assert [p for p in short_folder.rglob("*") if not p.is_dir()] == []


def test_one_job_after_another_with_the_same_key(as_ranks: AsRanks) -> None:
    for turn in range(10):
        assert (
            as_ranks(3, lambda communicators, t=turn: communicators.channel("user").allgather(t)).values()
            == [[turn] * 3] * 3
        )


def test_contexts_one_after_another_in_each_rank(as_ranks: AsRanks, rank_config: ConfigOf) -> None:
    """Ranks that close at different moments and knock at once for the next one."""

    def work(communicators: Communicators) -> Any:
        rank = communicators.all_ranks.rank
        out = []
        for turn in range(5):
            out.append(communicators.channel("user").allgather(turn))
            time.sleep(0.02 * ((rank + turn) % 3))
            communicators.close()
            communicators = connect(**rank_config(rank, 3))
        communicators.close()
        return out

    assert as_ranks(3, work, close=False).values() == [[[t] * 3 for t in range(5)]] * 3


def test_a_rank_that_is_there_twice_or_of_another_size_is_refused(
    rank_config: ConfigOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_membership, "WARN_AFTER", 0.0)
    chief, first = started(rank_config(0, 3)), started(rank_config(1, 3))
    until(lambda: IS_IN in caplog.text)
    twice, larger, beyond = finish(started(rank_config(1, 3)), started(rank_config(1, 4)), started(rank_config(3, 4)))
    assert isinstance(twice, RendezvousError) and f"rank 1 is already connected: pid {os.getpid()}" in str(twice)
    assert isinstance(larger, RendezvousError) and "size=4" in str(larger) and "size=3" in str(larger)
    assert isinstance(beyond, RendezvousError)
    assert all(isinstance(o, Communicators) for o in finish(chief, first, started(rank_config(2, 3))))


HELLO_OF_1 = {"rank": 1, "size": 3, "host": "h", "pid": 1, "job": "", "protocol": 2, "proof": ""}
GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 100_000,
    frame(CALL, b"cos\nsystem\n(S'true'\ntR."),
    frame(HELLO, b"x" * 65_537),
    frame(HELLO, b"not json"),
    frame(HELLO, b"[" * 5000),
    frame(HELLO, b'{"rank": 1}'),
    frame(HELLO, json.dumps({**HELLO_OF_1, "rank": "1"}).encode()),
    frame(HELLO, json.dumps({**HELLO_OF_1, "pid": []}).encode()),
]


@pytest.mark.parametrize("hang", [False, True])
def test_garbage_does_not_disturb_the_rendezvous(rank_config: ConfigOf, short_folder: Path, hang: bool) -> None:
    chief = started(rank_config(0, 3))
    path = door(short_folder)
    strangers = []
    for data in GARBAGE:
        stranger = socket.socket(socket.AF_UNIX)
        strangers.append(stranger)
        try:
            stranger.connect(path)
            stranger.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            continue
        if not hang:
            stranger.close()
    outcomes = finish(chief, started(rank_config(1, 3)), started(rank_config(2, 3)))
    for stranger in strangers:
        stranger.close()
    assert all(isinstance(o, Communicators) for o in outcomes), outcomes


@pytest.mark.parametrize("change, refusal", [({}, "DET_CORE_SECRET"), ({"protocol": 99}, "DET_CORE_SECRET")])
def test_who_does_not_know_the_secret_learns_nothing_else(
    rank_config: ConfigOf, short_folder: Path, change: dict[str, Any], refusal: str
) -> None:
    chief = started(rank_config(0, 3, secret="right"))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(door(short_folder))
        stranger.sendall(frame(HELLO, json.dumps({**HELLO_OF_1, **change}).encode()))
        said = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert refusal.encode() in said and b"protocol" not in said
    others = [started(rank_config(rank, 3, secret="right")) for rank in (1, 2)]
    assert all(isinstance(o, Communicators) for o in finish(chief, *others))


def test_a_worker_that_is_gone_before_it_is_welcomed_may_come_again(rank_config: ConfigOf, short_folder: Path) -> None:
    chief = started(rank_config(0, 3))
    hello = {**HELLO_OF_1, "job": RankConfig(**rank_config(1, 3)).digest}
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(door(short_folder))
        gone.shutdown(socket.SHUT_RD)  # as if it were closed, of which the chief hears as it answers
        gone.sendall(frame(HELLO, json.dumps(hello).encode()))
        assert all(
            isinstance(o, Communicators) for o in finish(chief, *(started(rank_config(rank, 3)) for rank in (1, 2)))
        )


def test_a_worker_that_dies_in_the_rendezvous_is_named(
    rank_config: ConfigOf, short_folder: Path, tmp_path: Path
) -> None:
    code = f"""
from det_core.ipc import _listener, _membership, connect
_membership.WARN_AFTER, _listener.SOCKET_DIRS = 0.0, ({str(short_folder)!r},)
connect(**{rank_config(1, 3)!r})"""
    chief, said = started(rank_config(0, 3)), tmp_path / "said"
    with said.open("wb") as out, subprocess.Popen([sys.executable, "-c", code], stderr=out) as worker:
        try:
            until(lambda: IS_IN in said.read_text(), of=worker)
        finally:
            worker.kill()
    (outcome,) = finish(chief)
    assert isinstance(outcome, PeerLost) and f"rank 1 (host {socket.gethostname()}, pid {worker.pid})" in str(outcome)


def test_what_killed_chiefs_left_is_removed_by_the_next_one(rank_config: ConfigOf, short_folder: Path) -> None:
    living = started(rank_config(0, 2, job=("living",)))
    folder = Path(door(short_folder)).parent
    alive = sorted(os.listdir(folder))
    for name in ("old.lock", "old.sock", "older.lock", "notes.txt"):
        (folder / name).write_text("")
    assert all(isinstance(o, Communicators) for o in finish(started(rank_config(0, 2)), started(rank_config(1, 2))))
    assert sorted(os.listdir(folder)) == sorted([*alive, "notes.txt"])
    finish(living, started(rank_config(1, 2, job=("living",))))
    assert os.listdir(folder) == ["notes.txt"]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("failure", ["disagreement", "no memory", ""])
def test_who_leaves_before_it_joins_the_ranks_of_its_machine_is_not_waited_for(
    rank_config: ConfigOf, leaver: int, failure: str
) -> None:
    """In a job of two machines the leaver takes itself for the only rank of its own."""

    def rank_main(rank: int) -> None:
        here = rank_config(rank, 4, machines=2, secret="s") | ({"local_size": 1} if rank == leaver else {})
        communicators = connect(**here)
        try:
            if failure == "disagreement":
                channel = communicators.channel("user")
                channel.allgather(0) if rank == leaver else channel.broadcast(0)
        finally:
            communicators.close(failure=RuntimeError(failure) if failure else None)

    ranks = [in_thread(lambda rank=rank: rank_main(rank)) for rank in range(4)]
    for thread, _ in ranks:
        thread.join()
    (error,) = ranks[1 - leaver][1]
    if failure == "disagreement":
        assert isinstance(error, CollectiveMismatch)
    else:
        assert isinstance(error, PeerLost) and f"rank {leaver} has closed its context" in str(error)
        assert failure in str(error)


def test_jobs_that_begin_and_end_at_once_do_not_sweep_each_other(rank_config: ConfigOf, short_folder: Path) -> None:
    def rank_of(job: str, rank: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                communicators = connect(**rank_config(rank, 2, job=(job,)))
                communicators.channel("user").allgather(job)
                communicators.close()

        return run

    running = [in_thread(rank_of(f"job {n}", rank)) for n in range(4) for rank in range(2)]
    for thread, _ in running:
        thread.join()
    assert [out for _, out in running] == [[None]] * 8
    assert [p for p in short_folder.rglob("*") if not p.is_dir()] == []


def test_a_port_is_not_opened_on_one_machine(rank_config: ConfigOf, short_folder: Path) -> None:
    arguments = rank_config(0, 2)
    chief = started(arguments)
    door(short_folder)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", arguments["port"])) != 0
    finish(chief, started(rank_config(1, 2)))
