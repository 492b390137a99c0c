"""How ranks of a machine find each other, and who is turned away without harm."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import CollectiveTimeout, PeerLost, RendezvousError
from det_core.ipc import Links, _liveness, connect
from det_core.ipc._connect import Place
from det_core.ipc._frames import Kind, encode
from det_core.ipc._join import join_unix
from det_core.ipc._rendezvous import Door, Hello, prove, rendezvous_path
from det_core.ipc._star import Star
from support.processes import until

AsRanks = Callable[..., Any]
PlaceOf = Callable[..., dict[str, Any]]
SOON = tuple(n / 20 for n in range(1, 10_000))
"""Warn of a rank that is waited for all the time: so the others are known to be there."""


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as e:
            out.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def started(place: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    return in_thread(lambda: connect(**place))


def finish(*started: tuple[threading.Thread, list[Any]]) -> list[Any]:
    """Wait for the rendezvous of all, close them, and return what each got."""
    for thread, _ in started:
        thread.join()
    assert not any(t.is_alive() for t, _ in started)
    outcomes = [out[0] for _, out in started]
    closing = [in_thread(o.close) for o in outcomes if isinstance(o, Links)]
    for thread, _ in closing:
        thread.join()
    return outcomes


def test_the_path_is_short_and_in_a_folder_of_this_user_alone() -> None:
    path = rendezvous_path(("a", "b"))
    assert len(path + ".sock") < 108
    folder = os.lstat(Path(path).parent)
    assert folder.st_uid == os.getuid() and folder.st_mode & 0o777 == 0o700
    assert path == rendezvous_path(("a", "b")) != rendezvous_path(("a", "c"))


def test_a_folder_that_is_somebody_elses_or_no_folder_is_passed_over(tmp_path: Path) -> None:
    taken, link, good = tmp_path / "taken", tmp_path / "link", tmp_path / "good"
    name = f"det_core-{os.getuid()}"
    for parent in (taken, link, good):
        parent.mkdir()
    (taken / name).write_text("")
    (tmp_path / "elsewhere").mkdir()
    (link / name).symlink_to(tmp_path / "elsewhere")
    path = rendezvous_path(("k",), folders=(str(taken), str(link), str(tmp_path / "missing"), str(good)))
    assert path.startswith(str(good))
    with pytest.raises(RendezvousError, match="no folder of this user's own"):
        rendezvous_path(("k",), folders=(str(taken), str(link)))


def test_a_folder_that_others_could_enter_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / f"det_core-{os.getuid()}"
    folder.mkdir(mode=0o755)
    rendezvous_path(("k",), folders=(str(tmp_path),))
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_waited_for_with_a_warning(
    place: PlaceOf, late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_liveness, "WARN_AFTER", SOON)
    with caplog.at_level(logging.WARNING, "det_core.ipc"):
        others = [started(place(r, 3)) for r in range(3) if r != late]
        until(lambda: ("waiting for rank 2" if late else "waits for the chief") in caplog.text)
        assert all(t.is_alive() for t, _ in others)
        outcomes = finish(*others, started(place(late, 3)))
    assert all(isinstance(o, Links) for o in outcomes), outcomes


def test_a_deadline_ends_the_rendezvous(place: PlaceOf) -> None:
    chief, worker = finish(started(place(0, 3, timeout=0.4)), started(place(1, 3)))
    assert isinstance(chief, CollectiveTimeout) and "waiting for rank 2" in str(chief)
    assert isinstance(worker, PeerLost) and "CollectiveTimeout" in str(worker)
    (alone,) = finish(started(place(1, 3, timeout=0.4)))
    assert isinstance(alone, CollectiveTimeout) and "no chief" in str(alone)


def test_a_second_chief_is_told_who_is_there(place: PlaceOf) -> None:
    first = started(place(0, 2))
    until(lambda: _listens(f"{Place(**place(0, 2)).path}.sock"))
    (second,) = finish(started(place(0, 2)))
    assert isinstance(second, RendezvousError)
    assert "this process is already the chief" in str(second) and "pub_port" in str(second)
    assert all(isinstance(o, Links) for o in finish(first, started(place(1, 2))))


def test_a_second_job_in_another_process_is_told_the_pid(place: PlaceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.ipc._rendezvous._LOCK_GRACE", 0.3)
    path = Place(**place(0, 2)).path
    code = f"""
        import sys, time
        from det_core.ipc._rendezvous import Door
        Door({path!r}); print("open", flush=True); time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
            (outcome,) = finish(started(place(0, 2)))
            assert isinstance(outcome, RendezvousError) and f"process {holder.pid} is already the chief" in str(outcome)
        finally:
            holder.kill()
    # its socket and its lock file are still there, but it is dead
    assert os.path.exists(path + ".sock")
    assert all(isinstance(o, Links) for o in finish(started(place(0, 2)), started(place(1, 2))))
    assert not os.path.exists(path + ".sock") and not os.path.exists(path + ".lock")


def test_one_job_after_another_with_the_same_key(as_ranks: AsRanks) -> None:
    for turn in range(10):
        assert as_ranks(3, lambda links, t=turn: links.lane("user").allgather(t)).values() == [[turn] * 3] * 3


def test_contexts_one_after_another_in_each_rank(as_ranks: AsRanks, place: PlaceOf) -> None:
    """Ranks that close at different moments and knock at once for the next one."""

    def work(links: Links) -> Any:
        rank = links.everyone.rank
        out = []
        for turn in range(5):
            out.append(links.lane("user").allgather(turn))
            time.sleep(0.02 * ((rank + turn) % 3))
            links.close()
            links = connect(**place(rank, 3))
        links.close()
        return out

    assert as_ranks(3, work, close=False).values() == [[[t] * 3 for t in range(5)]] * 3


def test_a_rank_that_is_there_twice_or_of_another_size_is_refused(
    place: PlaceOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_liveness, "WARN_AFTER", SOON)
    chief, first = started(place(0, 3)), started(place(1, 3))
    until(lambda: "waiting for rank 2" in caplog.text)
    twice, larger, beyond = finish(started(place(1, 3)), started(place(1, 4)), started(place(3, 4)))
    assert isinstance(twice, RendezvousError) and f"rank 1 is already there: pid {os.getpid()}" in str(twice)
    assert isinstance(larger, RendezvousError) and "size=4" in str(larger) and "size=3" in str(larger)
    assert isinstance(beyond, RendezvousError)
    assert all(isinstance(o, Links) for o in finish(chief, first, started(place(2, 3))))


def test_a_wrong_secret_is_refused(place: PlaceOf) -> None:
    here = Place(**place(0, 2, secret="right"))
    chief = started(place(0, 2, secret="right"))
    star = Star(rank=1, names=range(2))
    with pytest.raises(RendezvousError, match="DET_CORE_SECRET"):
        join_unix(star, here.path, "wrong", here.digest)
    star.close()
    assert all(isinstance(o, Links) for o in finish(chief, started(place(1, 2, secret="right"))))


def test_the_proof_depends_on_secret_nonce_and_rank() -> None:
    assert len({prove("s", "n", 1), prove("t", "n", 1), prove("s", "m", 1), prove("s", "n", 2)}) == 4
    assert prove(None, "n", 1) == ""


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 100_000,
    encode(Kind.CALL, name="user", number=1, body=b"cos\nsystem\n(S'true'\ntR."),
    encode(Kind.HELLO, body=b"not json"),
    encode(Kind.HELLO, body=b'{"rank": 1}'),
    encode(Kind.HELLO, body=b'{"rank": "1", "size": 2, "host": 5, "pid": []}'),
    encode(Kind.HELLO, body=b"[" * 5000),
    encode(Kind.HELLO, rank=1),
    encode(Kind.HELLO, body=Hello(1, 2, "h", 1, job="another").encode()),
    encode(Kind.HELLO, body=Hello(1, 2, "h", 1, protocol=99).encode()),
]


@pytest.mark.parametrize("hang", [False, True])
def test_garbage_does_not_disturb_the_rendezvous(place: PlaceOf, hang: bool) -> None:
    chief = started(place(0, 3))
    path = Place(**place(0, 3)).path + ".sock"
    until(lambda: _listens(path))  # its name is there a moment earlier
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
    outcomes = finish(chief, started(place(1, 3)), started(place(2, 3)))
    for stranger in strangers:
        stranger.close()
    assert all(isinstance(o, Links) for o in outcomes), outcomes


def test_a_worker_that_dies_in_the_rendezvous_is_named(
    place: PlaceOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_liveness, "WARN_AFTER", SOON)
    code = f"from det_core.ipc import connect; connect(**{place(1, 3)!r})"
    chief = started(place(0, 3))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as worker:
        try:
            until(lambda: "waiting for rank 2" in caplog.text, of=worker)
        finally:
            worker.kill()
    (outcome,) = finish(chief)
    assert isinstance(outcome, PeerLost) and f"rank 1 (host {socket.gethostname()}, pid {worker.pid})" in str(outcome)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as visitor:
        return visitor.connect_ex(path) == 0


def test_the_lock_is_not_kept_alive_by_a_file_that_was_removed(tmp_path: Path) -> None:
    first = Door(str(tmp_path / "key"))
    opened, out = in_thread(lambda: Door(str(tmp_path / "key")))
    opened.join()
    assert isinstance(out[0], RendezvousError)
    first.close()
    second = Door(str(tmp_path / "key"))
    assert re.fullmatch(r"\d+", (tmp_path / "key.lock").read_text())
    second.close()
    assert os.listdir(tmp_path) == []


def test_what_killed_chiefs_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    living = Door(str(tmp_path / "living"))
    for name in ("old.lock", "old.sock", "older.lock", "notes.txt"):
        (tmp_path / name).write_text("")
    door = Door(str(tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["living.lock", "living.sock", "new.lock", "new.sock", "notes.txt"]
    door.close()
    living.close()
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_doors_that_open_and_close_at_once_do_not_sweep_each_other(tmp_path: Path) -> None:
    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(60):
                door = Door(str(tmp_path / name))
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(door.path)
                door.close()

        return run

    running = [in_thread(work(f"key{i}")) for i in range(4)]
    for thread, _ in running:
        thread.join()
    assert [out for _, out in running] == [[None]] * 4
    assert os.listdir(tmp_path) == []


def test_a_port_is_not_opened_on_one_machine(place: PlaceOf) -> None:
    arguments = place(0, 2)
    chief = started(arguments)
    until(lambda: _listens(f"{Place(**arguments).path}.sock"))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", arguments["port"])) != 0
    finish(chief, started(place(1, 2)))
