"""The store: one thread that writes, a few that read."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Engine, text
from sqlalchemy.orm import Session

from det_core.errors import StoreError, StoreLocked
from det_core.master.store._commits import Ask, Commits
from det_core.master.store._database import (
    READERS,
    SERIES_READERS,
    FileLock,
    explain,
    is_trouble,
    parse,
    reading_engine,
    writing_engine,
)
from det_core.master.store._migrate import upgrade

LOG = logging.getLogger("det_core.master")
LOCK_CHECK_INTERVAL = 3.0
"""Seconds between checks that PostgreSQL still holds this master's lock."""
T = TypeVar("T")


class Store:
    """Everything that a master must not forget, in one database. Made by :meth:`open`.

    A *work* is a function of a Session. It sees what the works before it have written, is done whole or not at all, and
    must do nothing but use the session: it may be done a second time where its first transaction was lost. Objects that
    it returns are detached and plain.
    """

    def __init__(self, url: URL, writing: Engine, reading: Engine, lock: FileLock | None) -> None:
        self._url = url
        self._writing = writing
        self._reading = reading
        self._lock = lock
        self._commits = Commits(writing, url)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="det-core-read")
        self._series_readers = ThreadPoolExecutor(SERIES_READERS, thread_name_prefix="det-core-series")
        self._closed = False

    @classmethod
    def open(cls, url: str, on_new: Callable[[], None] = lambda: None, allocations: Path | None = None) -> Store:
        """Open a database, after creating it or bringing it up to date. Blocks for some 0.1 s.

        Args:
            url: ``sqlite:////path/to/file`` or ``postgresql://user@host/name``.
            on_new: Called before an empty database gets its tables; may raise to leave it empty.
            allocations: Directory of the allocations' folders, which get the log lines of an older schema.

        Raises:
            StoreLocked: If another master uses it.
            StoreError: If it cannot be used; the message says why.
            MissingExtra: If a package for it is not installed.
        """
        parsed = parse(url)
        # Before the file is opened: two masters would bring it up to date at once.
        lock = _claim(parsed)
        writing = writing_engine(parsed)
        reading = reading_engine(parsed)
        try:
            upgrade(writing, on_new, allocations)
            return cls(parsed, writing, reading, lock)
        except BaseException as e:
            writing.dispose()
            reading.dispose()
            if lock is not None:
                lock.release()
            if is_trouble(e):
                raise explain(e, parsed) from e
            raise

    @property
    def url(self) -> str:
        """URL of the database without a password."""
        return self._url.render_as_string(hide_password=True)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Do a work that writes; return its result when that is on the disk.

        Works of several callers share a transaction; one that raises changes nothing and harms no other. A caller that
        is cancelled meanwhile does not learn whether its work was done.

        Raises:
            StoreError: If the database cannot be written, and nothing of this work was kept; or the store is closed.
            Exception: Anything that the work raised.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commits.ask(Ask(work, future))
        return await future

    async def read(self, work: Callable[[Session], T]) -> T:
        """Do a work that only reads: all of it sees one state of the database, with every write that was answered.

        Raises:
            StoreError: If the database cannot be read, or the store is closed.
            Exception: Anything that the work raised.
        """
        return await self._read_in(self._readers, work)

    async def read_series(self, work: Callable[[Session], T]) -> T:
        """Read as :meth:`read` does, in threads of its own: for rows of metrics, so that long series block no other."""
        return await self._read_in(self._series_readers, work)

    async def _read_in(self, readers: ThreadPoolExecutor, work: Callable[[Session], T]) -> T:
        if self._closed:
            raise StoreError(f"the master's database {self._url.database} is closed")
        return await asyncio.get_running_loop().run_in_executor(readers, self._read, work)

    async def keep_lock(self) -> None:
        """Check every few seconds that no other master has the database, until cancelled.

        PostgreSQL drops the lock when it restarts, and a master that is idle does not notice. SQLite's is a file of
        this machine, held as long as this process lives: there it returns at once.

        Raises:
            StoreLocked: If another master has taken the database.
        """
        while self._lock is None:
            await asyncio.sleep(LOCK_CHECK_INTERVAL)
            try:
                # On the connection that holds the lock; one that is made anew has to take it.
                await self.write(lambda session: session.execute(text("SELECT 1")))
            except StoreLocked:
                raise
            except StoreError as e:  # away for a moment: the next write connects anew, and takes the lock
                LOG.warning("cannot check the lock of the database, retrying: %s", e)

    async def close(self) -> None:
        """Do all works that wait, then close everything. Twice is fine."""
        await asyncio.get_running_loop().run_in_executor(None, self.close_now)

    def close_now(self) -> None:
        """Close where no loop runs; on a loop's own thread this would keep the answers from arriving."""
        self._closed = True
        # First: what was promised is written before the readers go.
        self._commits.close()
        self._readers.shutdown()
        self._series_readers.shutdown()
        self._reading.dispose()
        self._writing.dispose()
        if self._lock is not None:
            self._lock.release()

    def _read(self, work: Callable[[Session], T]) -> T:
        try:
            with Session(self._reading, expire_on_commit=False) as session, session.begin():
                return work(session)
        except BaseException as e:
            if is_trouble(e):
                raise explain(e, self._url) from e
            raise


def _claim(url: URL) -> FileLock | None:
    """Create and lock a SQLite file that only its owner can read; return None for PostgreSQL."""
    if url.get_backend_name() != "sqlite":
        return None
    path = Path(str(url.database)).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return lock
    except OSError as e:
        raise StoreError(f"the master's database {path}: {e.strerror}; check the permissions of file and folder") from e
