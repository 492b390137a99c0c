"""The two kinds of databases, SQLite in a file and PostgreSQL by URL: connections, locks, messages."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from det_core import _clock
from det_core._optional import require
from det_core.errors import StoreError, StoreLocked

READERS = 4
"""Connections that read at a time, for all but series."""
SERIES_READERS = 2
"""Connections that read series at a time."""
BUSY_MS = 5000
"""Longest wait for a lock that another program holds on SQLite's file, such as a person's sqlite3 shell."""
CHECKPOINT_PAGES = 4000
"""Pages (4 KiB) of SQLite's write-ahead log after which they are copied into the database."""
ADVISORY_LOCK = 0x6465745F
"""Number of the lock that a master holds in a schema of a PostgreSQL database: the first letters of its name."""
SERVER_LOCK_TIMEOUT = 3.0
"""Longest wait for that lock in seconds: the server frees that of a master a moment after it has ended."""
FILE_LOCK_TIMEOUT = 1.0
"""Longest wait in seconds for a holder that is about to end, or for a child that it was just forking."""
_ADVICE = {
    "full": "the disk is full; free space there",
    "locked": "another program holds it locked; end that program (a sqlite3 shell, a backup)",
    "malformed": "the file is damaged; put a backup in its place, or move it away to begin anew",
    "not a database": "the file is damaged or no database; put a backup in its place, or move it away to begin anew",
    "readonly": "it cannot be written; check the permissions of file and folder",
    "unable to open": "it cannot be opened; check that the folder exists and can be written",
    "disk i/o error": "the disk refuses to read or write",
}
"""Advice by what SQLite says."""


def parse(url: str) -> URL:
    """Return the URL of a database; a bare ``postgresql://`` means psycopg 3.

    Raises:
        StoreError: If no store can be there.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError(
            f"{url!r} is not a database URL; give sqlite:////path/to/file or postgresql://host/name"
        ) from None
    kind = parsed.get_backend_name()
    if kind == "postgresql":
        require("psycopg", extra="postgres", purpose="a master's store in PostgreSQL")
        # SQLAlchemy's default is psycopg 2.
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise StoreError(f"a store is in SQLite or PostgreSQL, not in {kind}")
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError(f"{url} names no file; give sqlite:////path/to/file")
    return parsed.set(drivername="sqlite+pysqlite")


def writing_engine(url: URL) -> Engine:
    """Return an engine with one connection, whose transactions write from their start."""
    if url.get_backend_name() == "sqlite":
        # IMMEDIATE: a transaction that reads first and writes later could fail in between.
        return _sqlite(url, "BEGIN IMMEDIATE", pool_size=1, max_overflow=0)
    engine = create_engine(url, pool_size=1, max_overflow=0, connect_args=_timeouts())
    event.listen(engine, "connect", _take_advisory_lock)
    return engine


def reading_engine(url: URL) -> Engine:
    """Return an engine whose transactions each see one state of the database, and write nothing."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, "BEGIN", pool_size=READERS + SERIES_READERS, max_overflow=0)
    engine = create_engine(
        url, pool_size=READERS + SERIES_READERS, max_overflow=0, pool_pre_ping=True, connect_args=_timeouts()
    )
    # PostgreSQL's default shows each statement another state.
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _timeouts() -> dict[str, Any]:
    return {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


def _sqlite(url: URL, begin: str, **options: Any) -> Engine:
    arguments = {"check_same_thread": False, "timeout": BUSY_MS / 1000}
    engine = create_engine(url, connect_args=arguments, poolclass=QueuePool, **options)

    def on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where Python guesses
        # Readers and the writer do not wait for each other.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an answered commit survives a loss of power
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA cache_size = -16000")
        if begin == "BEGIN":
            connection.execute("PRAGMA query_only = ON")

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine


def _take_advisory_lock(connection: Any, _: Any) -> None:
    """Lock a PostgreSQL database for this master, for as long as the connection that writes lives."""
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")

        def take() -> bool:
            cursor.execute(
                "SELECT pg_try_advisory_lock(%s, hashtext(coalesce(current_schema(), '')))", (ADVISORY_LOCK,)
            )
            return bool(cursor.fetchone()[0])

        taken = _taken_within(SERVER_LOCK_TIMEOUT, take)
    connection.commit()
    if not taken:
        raise StoreLocked("another master uses this PostgreSQL database; stop it, or give each master its own")


def _taken_within(timeout: float, take: Callable[[], bool]) -> bool:
    """Try to take a lock for ``timeout`` seconds; return whether it was taken."""
    deadline = _clock.monotonic() + timeout
    while not take():
        if _clock.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class FileLock:
    """Right to use a SQLite file: a lock beside it, which the system frees however its holder ends.

    Raises:
        StoreLocked: If another process holds it; the message names host and pid.
        OSError: If the directory cannot be written.
    """

    def __init__(self, database: Path) -> None:
        # Not the database itself: SQLite's own locks are on it, and closing any descriptor would drop those.
        path = database.with_name(database.name + ".lock")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _taken_within(FILE_LOCK_TIMEOUT, self._take):
                who = _holder(self._fd)
                raise StoreLocked(f"another master uses {database} ({who}): stop that one, or work with it")
            # Who holds it is for people only; the lock is the kernel's.
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"host": os.uname().nodename, "pid": os.getpid()}).encode(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def release(self) -> None:
        """Free the lock. Twice is fine."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)


def _holder(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, 4096, 0))
        return f"pid {int(who['pid'])} on {who['host']}"
    except (ValueError, LookupError, TypeError):
        return "which has not said its pid"


def is_trouble(error: BaseException) -> bool:
    """Return whether an error is the database's own, and not one of a statement."""
    if isinstance(error, DBAPIError):
        return not isinstance(error, (IntegrityError, ProgrammingError, DataError))
    return isinstance(error, (PoolTimeout, sqlite3.DatabaseError))


def explain(error: BaseException, url: URL) -> StoreError:
    """Return a database's error as one line that says what to do."""
    cause = getattr(error, "orig", None) or error
    said = " ".join(str(cause).split())
    if url.get_backend_name() != "sqlite":
        return StoreError(f"the master's database {url.render_as_string(hide_password=True)}: {said}")
    advice = next((advice for words, advice in _ADVICE.items() if words in said.lower()), None)
    return StoreError(f"the master's database {url.database}: {f'{advice} ({said})' if advice else said}")
