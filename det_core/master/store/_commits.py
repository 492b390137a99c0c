"""The thread that writes: what was asked for meanwhile shares one transaction, and is answered when that is durable."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from det_core import _clock
from det_core.errors import StoreError
from det_core.master.store._trouble import explain, is_trouble

GROUP = 512
"""Works that share a transaction, at most."""
GROUP_SECONDS = 0.05
"""How long a transaction takes in further works."""


@dataclass(eq=False)
class Ask:
    """A work that waits to be done, and who waits for it."""

    work: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def do(self, conn: Connection) -> None:
        """Do the work; its failure is its own."""
        self.result = self.error = None
        try:
            self.result = self.work(conn)
        except BaseException as e:
            self.error = RuntimeError("the work raised StopIteration") if isinstance(e, StopIteration) else e


class Commits:
    """Does works one after the other on one connection.

    Args:
        engine: its only connection writes.
        url: the database's, for messages.
    """

    def __init__(self, engine: Engine, url: URL) -> None:
        self._engine, self._url = engine, url
        self._lost = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        self._asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._conn: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="det-core-store", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask) -> None:
        """Do a work in its turn.

        Raises:
            StoreError: the store is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreError(f"the master's database {self._url.database} is closed")
            self._asked.put(ask)

    def close(self) -> None:
        """Do what was asked for, then end. Twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._asked.get()) is not None:
            group = [first]
            try:
                self._commit(group)
            except BaseException as e:
                self._drop()
                for ask in group:
                    ask.error = self._told(e)
            answer(group)
            del first, group
        if self._conn is not None:
            self._conn.close()

    def _commit(self, group: list[Ask]) -> None:
        """Do the works of a group, and those that come meanwhile; what this raises concerns all of them."""
        transaction = self._connection().begin()
        try:
            self._do(group)
        except self._lost:  # the transaction is, and was not committed: each by itself, then
            self._drop()
            for ask in group:
                self._alone(ask)
        else:
            if all(ask.error is not None for ask in group):
                transaction.rollback()
            else:
                transaction.commit()

    def _do(self, group: list[Ask]) -> None:
        conn, deadline = self._connection(), _clock.monotonic() + GROUP_SECONDS
        savepoint: Any = conn.connection.driver_connection  # SQLAlchemy takes longer for it than for many a work
        ask = group[0]
        while True:
            savepoint.execute("SAVEPOINT work")
            ask.do(conn)
            if ask.error is not None:
                if isinstance(ask.error, SQLAlchemyError) and is_trouble(ask.error):
                    raise ask.error
                savepoint.execute("ROLLBACK TO SAVEPOINT work")
            savepoint.execute("RELEASE SAVEPOINT work")
            following = self._next() if len(group) < GROUP and _clock.monotonic() < deadline else None
            if following is None:
                return
            group.append(ask := following)

    def _next(self) -> Ask | None:
        try:
            ask = self._asked.get_nowait()
        except queue.Empty:
            return None
        if ask is None:  # to be closed: for the thread's own loop to see
            self._asked.put(None)
        return ask

    def _alone(self, ask: Ask) -> None:
        """Do a work in a transaction of its own."""
        try:
            transaction = self._connection().begin()
            ask.do(self._connection())
            if ask.error is None:
                transaction.commit()
                return
            ask.error = self._told(ask.error)
        except BaseException as e:
            ask.error = self._told(e)
        self._drop()

    def _connection(self) -> Connection:
        if self._conn is None:
            self._conn = self._engine.connect()
        return self._conn

    def _drop(self) -> None:
        """Give the connection up: nobody knows what state it is in."""
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(SQLAlchemyError):
                conn.invalidate()
            with contextlib.suppress(SQLAlchemyError):
                conn.close()

    def _told(self, error: BaseException) -> BaseException:
        return explain(error, self._url) if is_trouble(error) else error


def answer(group: Sequence[Ask]) -> None:
    """Tell each who waits, on his own loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Ask]] = defaultdict(list)
    for ask in group:
        by_loop[ask.future.get_loop()].append(ask)
    for loop, asks in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, asks)


def _settle(asks: Sequence[Ask]) -> None:
    for ask in asks:
        if ask.future.done():  # who asked was cancelled
            continue
        if ask.error is None:
            ask.future.set_result(ask.result)
        else:
            ask.future.set_exception(ask.error)
