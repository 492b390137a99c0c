"""Rendezvous of the ranks of one node, and refusal of others."""

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
"""Part of the warning of an admitted worker, which comes at once where a test sets its time to 0."""


def socket_in(folder: Path) -> str:
    """Return the path of the socket below ``folder``, once the chief listens there."""
    found: list[Path] = []

    def listens() -> bool:
        found[:] = folder.rglob("*.sock")
        with socket.socket(socket.AF_UNIX) as visitor:
            return bool(found) and visitor.connect_ex(str(found[0])) == 0

    until(listens)
    return str(found[0])


def test_socket_directory_that_is_not_private_is_skipped(
    rank_config: ConfigOf, tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, link = tmp_path / "taken", tmp_path / "link"
    name = f"det_core-{os.getuid()}"
    for parent in (taken, link):
        parent.mkdir()
    (taken / name).write_text("")
    (tmp_path / "elsewhere").mkdir()
    (link / name).symlink_to(tmp_path / "elsewhere")
    (socket_dir / name).mkdir(mode=0o755)  # others could enter it
    bad = (str(taken), str(link), str(tmp_path / "missing"))
    monkeypatch.setattr("det_core.ipc._listener.SOCKET_DIRS", (*bad, str(socket_dir)))
    chief = started(rank_config(0, 2))
    assert socket_in(socket_dir).startswith(f"{socket_dir}/{name}/")
    entry = os.lstat(socket_dir / name)
    assert entry.st_uid == os.getuid() and entry.st_mode & 0o777 == 0o700
    finish(chief, started(rank_config(1, 2)))
    monkeypatch.setattr("det_core.ipc._listener.SOCKET_DIRS", bad)
    with pytest.raises(RendezvousError, match="no private directory"):
        connect(**rank_config(0, 2))


@pytest.mark.parametrize("late", [0, 2])
def test_late_rank_is_waited_for_with_a_warning(
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


def test_rendezvous_past_its_timeout_raises_on_every_rank(rank_config: ConfigOf) -> None:
    chief, worker = finish(started(rank_config(0, 3, timeout=0.4)), started(rank_config(1, 3)))
    assert isinstance(chief, CollectiveTimeout) and "timed out after 0.4 s waiting for rank 2" in str(chief)
    assert isinstance(worker, PeerLost) and "CollectiveTimeout" in str(worker)
    (alone,) = finish(started(rank_config(1, 3, timeout=0.4)))
    assert isinstance(alone, CollectiveTimeout) and "no chief at" in str(alone)


def test_second_chief_in_a_process_is_refused(rank_config: ConfigOf, socket_dir: Path) -> None:
    first = started(rank_config(0, 2))
    socket_in(socket_dir)
    (second,) = finish(started(rank_config(0, 2)))
    assert isinstance(second, RendezvousError)
    assert "this process is already the chief" in str(second) and "pub_port" in str(second)
    assert all(isinstance(o, Communicators) for o in finish(first, started(rank_config(1, 2))))


def test_second_chief_beside_another_process_is_refused_with_its_pid(
    rank_config: ConfigOf, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.ipc._listener._LOCK_TIMEOUT", 0.3)
    code = f"""
from det_core.ipc import _listener, connect
_listener.SOCKET_DIRS = ({str(socket_dir)!r},)
connect(**{rank_config(0, 2)!r})"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as holder:
        try:
            path = socket_in(socket_dir)
            (outcome,) = finish(started(rank_config(0, 2)))
            assert isinstance(outcome, RendezvousError) and f"process {holder.pid} is already the chief" in str(outcome)
        finally:
            holder.kill()
    # The files of the killed process are still there.
    assert os.path.exists(path)
    assert all(isinstance(o, Communicators) for o in finish(started(rank_config(0, 2)), started(rank_config(1, 2))))
    assert [p for p in socket_dir.rglob("*") if not p.is_dir()] == []


def test_jobs_with_one_key_after_one_another_connect(as_ranks: AsRanks) -> None:
    for turn in range(10):
        assert (
            as_ranks(3, lambda communicators, t=turn: communicators.channel("user").allgather(t)).values()
            == [[turn] * 3] * 3
        )


def test_reconnect_at_once_in_each_rank_connects(as_ranks: AsRanks, rank_config: ConfigOf) -> None:
    """Ranks that close at different moments connect again at once."""

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


def test_duplicate_rank_or_another_size_is_refused(
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
def test_rendezvous_ignores_garbage(rank_config: ConfigOf, socket_dir: Path, hang: bool) -> None:
    chief = started(rank_config(0, 3))
    path = socket_in(socket_dir)
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
def test_worker_without_the_secret_learns_nothing_else(
    rank_config: ConfigOf, socket_dir: Path, change: dict[str, Any], refusal: str
) -> None:
    chief = started(rank_config(0, 3, secret="right"))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(socket_in(socket_dir))
        stranger.sendall(frame(HELLO, json.dumps({**HELLO_OF_1, **change}).encode()))
        reply = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert refusal.encode() in reply and b"protocol" not in reply
    others = [started(rank_config(rank, 3, secret="right")) for rank in (1, 2)]
    assert all(isinstance(o, Communicators) for o in finish(chief, *others))


def test_worker_lost_before_its_welcome_can_retry(rank_config: ConfigOf, socket_dir: Path) -> None:
    chief = started(rank_config(0, 3))
    hello = {**HELLO_OF_1, "job": RankConfig(**rank_config(1, 3)).digest}
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(socket_in(socket_dir))
        gone.shutdown(socket.SHUT_RD)  # the chief gets an error as it replies
        gone.sendall(frame(HELLO, json.dumps(hello).encode()))
        assert all(
            isinstance(o, Communicators) for o in finish(chief, *(started(rank_config(rank, 3)) for rank in (1, 2)))
        )


def test_worker_killed_in_the_rendezvous_is_named(rank_config: ConfigOf, socket_dir: Path, tmp_path: Path) -> None:
    code = f"""
from det_core.ipc import _listener, _membership, connect
_membership.WARN_AFTER, _listener.SOCKET_DIRS = 0.0, ({str(socket_dir)!r},)
connect(**{rank_config(1, 3)!r})"""
    chief = started(rank_config(0, 3))
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen([sys.executable, "-c", code], stderr=out) as worker:
        try:
            until(lambda: IS_IN in log.read_text(), of=worker)
        finally:
            worker.kill()
    (outcome,) = finish(chief)
    assert isinstance(outcome, PeerLost) and f"rank 1 (host {socket.gethostname()}, pid {worker.pid})" in str(outcome)


def test_files_of_killed_chiefs_are_removed_by_the_next_one(rank_config: ConfigOf, socket_dir: Path) -> None:
    living = started(rank_config(0, 2, job=("living",)))
    folder = Path(socket_in(socket_dir)).parent
    alive = sorted(os.listdir(folder))
    for name in ("old.lock", "old.sock", "older.lock", "notes.txt"):
        (folder / name).write_text("")
    assert all(isinstance(o, Communicators) for o in finish(started(rank_config(0, 2)), started(rank_config(1, 2))))
    assert sorted(os.listdir(folder)) == sorted([*alive, "notes.txt"])
    finish(living, started(rank_config(1, 2, job=("living",))))
    assert os.listdir(folder) == ["notes.txt"]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("failure", ["disagreement", "no memory", ""])
def test_rank_that_departs_before_it_joins_its_node_is_not_waited_for(
    rank_config: ConfigOf, leaver: int, failure: str
) -> None:
    """In a job of two nodes the rank that departs takes itself for the only one of its node."""

    def rank_main(rank: int) -> None:
        here = rank_config(rank, 4, nodes=2, secret="s") | ({"local_size": 1} if rank == leaver else {})
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


def test_jobs_at_the_same_moment_keep_their_sockets(rank_config: ConfigOf, socket_dir: Path) -> None:
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
    assert [p for p in socket_dir.rglob("*") if not p.is_dir()] == []


def test_single_node_opens_no_port(rank_config: ConfigOf, socket_dir: Path) -> None:
    arguments = rank_config(0, 2)
    chief = started(arguments)
    socket_in(socket_dir)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", arguments["port"])) != 0
    finish(chief, started(rank_config(1, 2)))
