"""Ranks as threads, each with its communicators; and frames encoded by hand, for unauthenticated peers."""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core.ipc import Communicators, connect
from support.processes import free_port
from support.threads import join_ranks

Work = Callable[[Communicators], Any]


HELLO, CALL = 2, 6
"""Kinds of frames."""


def frame(kind: int, body: bytes, rank: int = 0) -> bytes:
    """Return a frame with one segment and without a name."""
    return struct.pack("<HBBHIQIQ", 0xDE7C, kind, 0, 0, rank, 0, 1, len(body)) + body


class Outcomes(list[Any]):
    """Return value or exception of each rank."""

    def values(self) -> list[Any]:
        """Return the values, or raise the exception of the lowest failed rank."""
        for outcome in self:
            if isinstance(outcome, BaseException):
                raise outcome
        return list(self)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread, and return it with a list for its return value or exception."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as e:
            out.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def started(rank_config: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a rank, as ``in_thread`` does."""
    return in_thread(lambda: connect(**rank_config))


def finish(*started: tuple[threading.Thread, list[Any]]) -> list[Any]:
    """Wait for the rendezvous of all, close them, and return their outcomes."""
    failed = lambda: next((out[0] for _, out in started if out and isinstance(out[0], BaseException)), None)  # noqa: E731
    join_ranks([thread for thread, _ in started], failed)
    outcomes = [out[0] for _, out in started]
    closing = [in_thread(o.close) for o in outcomes if isinstance(o, Communicators)]
    for thread, _ in closing:
        thread.join()
    return outcomes


@pytest.fixture
def rank_config() -> Callable[..., dict[str, Any]]:
    """Return a function for the fields of ``RankConfig``, with the same port for all ranks of the test."""
    port = free_port()

    def make(rank: int, size: int, nodes: int = 1, **more: Any) -> dict[str, Any]:
        local_size = size // nodes
        return {
            "rank": rank, "size": size, "local_rank": rank % local_size, "local_size": local_size,
            "cross_rank": rank // local_size, "cross_size": nodes,
            "chief_ip": "127.0.0.1" if nodes > 1 else None, "port": port, **more,
        }  # fmt: skip

    return make


@pytest.fixture
def socket_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of the sockets, with a path short enough for one (108 bytes)."""
    with tempfile.TemporaryDirectory(prefix="ipc", dir="/tmp") as folder:
        monkeypatch.setattr("det_core.ipc._listener.SOCKET_DIRS", (folder,))
        yield Path(folder)


@pytest.fixture
def as_ranks(rank_config: Callable[..., dict[str, Any]]) -> Callable[..., Outcomes]:
    """Return a function that calls ``work(communicators)`` in a thread per rank, and closes them by default."""

    def run(size: int, work: Work, *, close: bool = True, **arguments: Any) -> Outcomes:
        outcomes = Outcomes([None] * size)

        def rank_main(rank: int) -> None:
            try:
                communicators = connect(**rank_config(rank, size, **arguments))
                try:
                    outcomes[rank] = work(communicators)
                finally:
                    if close:
                        communicators.close()
            except BaseException as e:
                outcomes[rank] = e

        threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(size)]
        for thread in threads:
            thread.start()
        join_ranks(threads, lambda: next((o for o in outcomes if isinstance(o, BaseException)), None))
        return outcomes

    return run
