"""The thread that writes: works that wait share a transaction, and are answered when it is durable.

The thread owns a session. A work may load, change and add objects; they are written at its end and detached then, so
that none of them is used by another thread while it belongs to the session.
"""

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
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.errors import StoreError
from det_core.master.store._database import explain, is_trouble

MAX_GROUP = 512
"""Works that share a transaction, at most."""
GROUP_TIMEOUT = 0.05
"""Seconds after which a transaction takes in no further works."""


class _TransactionLost(Exception):
    """A work that broke the transaction of all works of its group."""


@dataclass(eq=False)
class Ask:
    """A work that waits, and the future of its caller."""

    work: Callable[[Session], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def do(self, session: Session) -> None:
        """Do the work and write its objects; its error is kept for its caller."""
        self.result = None
        self.error = None
        try:
            self.result = self.work(session)
            session.flush()
        except StopIteration:  # which a future refuses to hold
            self.error = RuntimeError("the work raised StopIteration")
        except BaseException as e:
            self.error = e
        session.expunge_all()


class Commits:
    """Does works one after the other on one connection.

    Args:
        engine: Engine whose only connection writes.
        url: URL of the database, for messages.
    """

    def __init__(self, engine: Engine, url: URL) -> None:
        self._engine = engine
        self._url = url
        self._lost = (_TransactionLost, SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        self._asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        # Works come from several threads and loops.
        self._lock = threading.Lock()
        self._closed = False
        self._conn: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="det-core-store", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask) -> None:
        """Do a work in its turn.

        Raises:
            StoreError: If the store is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreError(f"the master's database {self._url.database} is closed")
            self._asked.put(ask)

    def close(self) -> None:
        """Do all works that wait, then end. Twice is fine."""
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
                    ask.error = self._explained(e)
            answer(group)
            # Or their results would stay in memory until the next work comes.
            del first, group
        if self._conn is not None:
            self._conn.close()

    def _commit(self, group: list[Ask]) -> None:
        """Do the works of a group, and those that come meanwhile; what this raises concerns all of them."""
        conn = self._connection()
        transaction = conn.begin()
        try:
            with _session(conn) as session:
                self._do(group, session)
        except self._lost:  # nothing was committed: each in a transaction of its own, then
            self._drop()
            for ask in group:
                self._do_alone(ask)
        else:
            if all(ask.error is not None for ask in group):
                transaction.rollback()
            else:
                transaction.commit()

    def _do(self, group: list[Ask], session: Session) -> None:
        deadline = _clock.monotonic() + GROUP_TIMEOUT
        # By the driver itself: SQLAlchemy takes longer for a savepoint than for many a work.
        driver: Any = session.connection().connection.driver_connection
        ask = group[0]
        while True:
            driver.execute("SAVEPOINT work")
            ask.do(session)
            if ask.error is not None:
                # A full disk has rolled the whole transaction back, savepoints and all.
                if (isinstance(ask.error, SQLAlchemyError) and is_trouble(ask.error)) or not session.is_active:
                    raise _TransactionLost from ask.error
                driver.execute("ROLLBACK TO SAVEPOINT work")
            driver.execute("RELEASE SAVEPOINT work")
            following = self._next() if len(group) < MAX_GROUP and _clock.monotonic() < deadline else None
            if following is None:
                return
            group.append(ask := following)

    def _next(self) -> Ask | None:
        try:
            ask = self._asked.get_nowait()
        except queue.Empty:
            return None
        if ask is None:  # close(): the thread's own loop must see it
            self._asked.put(None)
        return ask

    def _do_alone(self, ask: Ask) -> None:
        """Do a work in a transaction of its own."""
        try:
            conn = self._connection()
            transaction = conn.begin()
            with _session(conn) as session:
                ask.do(session)
            if ask.error is None:
                transaction.commit()
                return
            ask.error = self._explained(ask.error)
        except BaseException as e:
            ask.error = self._explained(e)
        self._drop()

    def _connection(self) -> Connection:
        if self._conn is None:
            self._conn = self._engine.connect()
        return self._conn

    def _drop(self) -> None:
        """Close the connection, whose state is unknown."""
        conn = self._conn
        self._conn = None
        if conn is not None:
            with contextlib.suppress(SQLAlchemyError):
                # It may be half-way through an answer, and must not go back into the pool.
                conn.invalidate()
            with contextlib.suppress(SQLAlchemyError):
                conn.close()

    def _explained(self, error: BaseException) -> BaseException:
        return explain(error, self._url) if is_trouble(error) else error


def _session(conn: Connection) -> Session:
    """Return a session within the transaction of a connection, which it neither commits nor rolls back by closing."""
    return Session(conn, expire_on_commit=False, join_transaction_mode="rollback_only")


def answer(group: Sequence[Ask]) -> None:
    """Answer each caller on its own loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Ask]] = defaultdict(list)
    for ask in group:
        by_loop[ask.future.get_loop()].append(ask)
    for loop, asks in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, asks)


def _settle(asks: Sequence[Ask]) -> None:
    for ask in asks:
        if ask.future.done():  # its caller was cancelled
            continue
        if ask.error is None:
            ask.future.set_result(ask.result)
        else:
            ask.future.set_exception(ask.error)
