"""How each kind of database is opened: SQLite in a file beside the master, PostgreSQL by URL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from det_core._optional import require
from det_core.errors import StoreError
from det_core.master.store._lock import taken_within

READERS = 4
"""Connections that read at a time, for all but series."""
SERIES_READERS = 2
"""Connections that read series at a time."""
BUSY_MS = 5000
"""How long SQLite waits for somebody else's lock, such as that of a person's sqlite3 shell."""
CHECKPOINT_PAGES = 4000
"""Pages (4 KiB) of SQLite's write-ahead log after which they are carried over into the database."""
ADVISORY_LOCK = 0x6465745F
"""What a master locks in a schema of a PostgreSQL database: the first letters of its name."""
LOCK_WAIT = 3.0
"""Seconds to wait for that: the server lets go of a master's that has ended a moment after it."""


def parse(url: str) -> URL:
    """A database's URL; a bare ``postgresql://`` means psycopg 3.

    Raises:
        StoreError: it is none that a store can be in.
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
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise StoreError(f"a store is in SQLite or PostgreSQL, not in {kind}")
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError(f"{url} names no file; give sqlite:////path/to/file")
    return parsed.set(drivername="sqlite+pysqlite")


def writing_engine(url: URL) -> Engine:
    """One connection, whose transactions write from their start."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, "BEGIN IMMEDIATE", pool_size=1, max_overflow=0)
    engine = create_engine(url, pool_size=1, max_overflow=0, connect_args=_patience())
    event.listen(engine, "connect", _take_advisory_lock)
    return engine


def reading_engine(url: URL) -> Engine:
    """A few connections, each of whose transactions sees one state of the database, and writes nothing."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, "BEGIN", pool_size=READERS + SERIES_READERS, max_overflow=0)
    engine = create_engine(
        url, pool_size=READERS + SERIES_READERS, max_overflow=0, pool_pre_ping=True, connect_args=_patience()
    )
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _patience() -> dict[str, Any]:
    return {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


def _sqlite(url: URL, begin: str, **options: Any) -> Engine:
    from sqlalchemy.pool import QueuePool

    arguments = {"check_same_thread": False, "timeout": BUSY_MS / 1000}
    engine = create_engine(url, connect_args=arguments, poolclass=QueuePool, **options)

    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where Python guesses
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an answered commit survives a loss of power
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA cache_size = -16000")
        if begin == "BEGIN":
            connection.execute("PRAGMA query_only = ON")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def _take_advisory_lock(connection: Any, _: Any) -> None:
    """One master a database: the lock lives as long as the connection that writes."""
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")

        def take() -> bool:
            cursor.execute(
                "SELECT pg_try_advisory_lock(%s, hashtext(coalesce(current_schema(), '')))", (ADVISORY_LOCK,)
            )
            return bool(cursor.fetchone()[0])

        taken = taken_within(LOCK_WAIT, take)
    connection.commit()
    if not taken:
        from det_core.errors import StoreLocked

        raise StoreLocked("another master uses this PostgreSQL database; stop it, or give each master its own")
