"""The store itself: works done whole or not at all, answered when they are durable, and clear errors."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from det_core.errors import StoreError, StoreLocked
from det_core.master.store import Store
from det_core.master.store.models import KeyValue
from support import key_values

HOLDER = """
import signal, sys
from det_core.master.store import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
signal.pause()
"""


def put(key: str, value: Any = 1) -> Any:
    return lambda session: key_values.put(session, key, value)


async def keys(store: Store, *names: str) -> list[Any]:
    return await store.read(lambda session: [key_values.get(session, name) for name in names])


async def test_a_work_that_fails_harms_no_other(store: Store) -> None:
    def fail(session: Session) -> None:
        key_values.put(session, "half", 1)
        raise LookupError("mine")

    def breaks(session: Session) -> None:
        key_values.put(session, "half", 1)
        session.execute(text("INSERT INTO nowhere VALUES (1)"))

    def clashes(session: Session) -> None:
        key_values.put(session, "half", 1)
        session.add(KeyValue(key="a", value=2))

    def stops(session: Session) -> None:
        raise StopIteration

    works = [put("a"), fail, put("b"), breaks, stops, put("c"), clashes] * 20
    results = await asyncio.gather(*(store.write(work) for work in works), return_exceptions=True)
    kinds = [type(result).__name__ for result in results[:7]]
    assert kinds == ["NoneType", "LookupError", "NoneType", kinds[3], "RuntimeError", "NoneType", "IntegrityError"]
    assert kinds[3] in ("OperationalError", "StoreError", "ProgrammingError")
    assert await keys(store, "a", "b", "c", "half") == [1, 1, 1, None]


async def test_a_work_sees_what_those_before_it_wrote(store: Store) -> None:
    def count(session: Session) -> int:
        key_values.put(session, "n", key_values.get(session, "n", 0) + 1)
        return int(key_values.get(session, "n"))

    assert await asyncio.gather(*(store.write(count) for _ in range(300))) == list(range(1, 301))


async def test_a_read_sees_one_state_of_the_database(store: Store) -> None:
    started = asyncio.Event()
    go_on = threading.Event()
    loop = asyncio.get_running_loop()

    def reads(session: Session) -> tuple[Any, Any]:
        first = key_values.get(session, "a")
        loop.call_soon_threadsafe(started.set)
        go_on.wait()
        return first, key_values.get(session, "a")

    await store.write(put("a", 1))
    reading = asyncio.create_task(store.read(reads))
    await started.wait()
    await store.write(put("a", 2))
    go_on.set()
    assert await reading == (1, 1)
    assert await keys(store, "a") == [2]


async def test_long_reads_of_series_block_no_other_read(store: Store) -> None:
    over = threading.Event()

    long = [asyncio.create_task(store.read_series(lambda session: over.wait())) for _ in range(6)]
    await asyncio.sleep(0)
    assert await asyncio.gather(*(store.read(lambda session: 1) for _ in range(20))) == [1] * 20
    over.set()
    assert await asyncio.gather(*long) == [True] * 6


async def test_readers_cannot_write(store: Store) -> None:
    with pytest.raises(StoreError, match=r"readonly|read-only"):
        await store.read(put("a"))


async def test_who_is_cancelled_leaves_the_others_alone(store: Store) -> None:
    asks = [asyncio.create_task(store.write(put(str(i)))) for i in range(50)]
    await asyncio.sleep(0)
    for ask in asks[::2]:
        ask.cancel()
    results = await asyncio.gather(*asks, return_exceptions=True)
    assert results[1::2] == [None] * 25
    assert (await keys(store, *map(str, range(50))))[1::2] == [1] * 25


async def test_close_does_what_was_asked_for(url: str) -> None:
    store = Store.open(url)
    asks = [asyncio.create_task(store.write(put(str(i)))) for i in range(200)]
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    assert await asyncio.gather(*asks) == [None] * 200
    with pytest.raises(StoreError, match="is closed"):
        await store.write(put("late"))
    with pytest.raises(StoreError, match="is closed"):
        await store.read(lambda session: 1)
    again = Store.open(url)
    assert await keys(again, *map(str, range(200)), "late") == [1] * 200 + [None]
    again.close_now()


def test_a_second_master_is_refused_until_the_first_has_died(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.master.store._database.FILE_LOCK_TIMEOUT", 0.1)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreLocked, match=f"pid {holder.pid} on" if "sqlite" in url else "another master"):
            Store.open(url)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    Store.open(url).close_now()


async def test_a_full_disk_is_one_clear_error_and_ends_when_there_is_room(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/master.db")
    most = 300  # pages, in whatever connection

    def limit(connection: Any, *_: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {most}")

    await store.write(put("before"))
    event.listen(store._writing, "begin", lambda session: limit(session.connection.driver_connection))
    big = put("big", "x" * 10_000_000)
    works = [put("one"), big, put("two"), big, put("three")]
    results = await asyncio.gather(*map(store.write, works), return_exceptions=True)
    assert results[0::2] == [None] * 3
    for result in results[1::2]:
        assert isinstance(result, StoreError)
        assert "master.db: the disk is full; free space there" in str(result)
    most = 1_000_000
    await store.write(big)
    assert await keys(store, "before", "one", "two", "three") == [1] * 4
    store.close_now()


async def test_a_file_that_someone_else_locks_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.master.store._database.BUSY_MS", 50)
    store = Store.open(f"sqlite:///{tmp_path}/master.db")
    shell = sqlite3.connect(tmp_path / "master.db", isolation_level=None)
    shell.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program holds it locked"):
        await store.write(put("a"))
    shell.execute("ROLLBACK")
    shell.close()
    await store.write(put("b"))
    assert await keys(store, "a", "b") == [None, 1]
    store.close_now()


@pytest.mark.parametrize("content", [b"no database " * 1000, b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "master.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"master\.db: the file is damaged .*put a backup in its place") as e:
        Store.open(f"sqlite:///{tmp_path}/master.db")
    assert "\n" not in str(e.value)
    assert (tmp_path / "master.db").read_bytes() == content


def test_nobody_else_can_read_the_file(tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path}/a/b/master.db").close_now()
    assert (tmp_path / "a/b/master.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("no url", "is not a database URL"),
        ("mysql://host/name", "not in mysql"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////proc/nothing/master.db", "check the permissions"),
        (
            "postgresql://someone:secret@127.0.0.1:1/nothing",
            r"postgresql\+psycopg://someone:\*\*\*@127.0.0.1:1/nothing",
        ),
    ],
)
def test_a_place_that_is_none_is_one_clear_error(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as e:
        Store.open(url)
    assert "secret" not in str(e.value)
