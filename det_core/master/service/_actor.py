"""The actor: requests and events are decided one by one, and decisions are stored before they are answered.

A command is a plain function. It looks at the live state, changes it, and notes on the :class:`Transaction`
what is to be written and what is to be done once that is safe. Commands that wait at the same time share one
transaction. If the store refuses it, the live state is made anew from the store, and each command is tried alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import inspect

from det_core.errors import StoreError
from det_core.master._errors import MasterError, Stopping
from det_core.master.store import Store, change

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.store.models import Base

LOG = logging.getLogger("det_core")

T = TypeVar("T")

MOST = 256
"""Commands that share a transaction at most, so that none waits for long."""
RETRY = 1.0
"""Seconds after which an event is taken again that could not be decided; they double with each further failure."""
MAX_RETRY_DELAY = 10.0
"""Maximum of these seconds."""


@dataclass
class Transaction:
    """Decisions of the commands of one transaction.

    Attributes:
        writes: what is to be written, in order.
        effects: what is to be done afterwards, in order; none of it may wait.
        topics: what has changed, in order.
    """

    writes: list[Callable[[Session], object]] = field(default_factory=list)
    effects: list[Callable[[], None]] = field(default_factory=list)
    topics: dict[Hashable, None] = field(default_factory=dict)

    def write(self, work: Callable[..., object], *args: Any, **named: Any) -> None:
        """Have ``work(session, …)`` write, in the order of these calls."""
        self.writes.append(lambda session: work(session, *args, **named))

    def add(self, row: Base) -> None:
        """Have a new row stored as it is now; it stays the live state's, and what is stored is a copy."""
        kind = type(row)
        values = {column.key: getattr(row, column.key) for column in inspect(kind).column_attrs}

        def insert(session: Session) -> None:
            session.add(kind(**values))
            session.flush()  # in this order: SQLAlchemy does not know which table refers to which

        self.writes.append(insert)

    def change(self, row: Base, **values: Any) -> None:
        """Change columns of a row of the live state, and have the change stored."""
        for name, value in values.items():
            setattr(row, name, value)
        key = tuple(inspect(type(row)).primary_key_from_instance(row))
        self.write(change, type(row), key, **values)

    def then(self, effect: Callable[..., None], *args: Any) -> None:
        """Have ``effect(…)`` done once everything is written."""
        self.effects.append(lambda: effect(*args))

    def publish(self, *topics: Hashable) -> None:
        """Have a change of each topic published once everything is written and done."""
        for topic in topics:
            self.topics[topic] = None

    def commit(self, session: Session) -> None:
        """Write all of it."""
        for work in self.writes:
            work(session)


Command = Callable[[Transaction], T]


@dataclass
class _Asked:
    """A command that waits.

    Attributes:
        command: the command.
        answer: future of its answer.
        known: the message of its last failure, which is not logged again.
    """

    command: Command[Any]
    answer: asyncio.Future[Any]
    known: str = ""


class Actor:
    """Carries out commands, one after the other.

    Args:
        store: where decisions are kept.
        settle: called after each command, to decide what follows from it.
        conclude: called once for the commands of a transaction, to decide what follows from them all.
        reload: makes the live state anew from the store.
        publish: called with the topics that a transaction has changed.
    """

    def __init__(
        self,
        store: Store,
        settle: Command[None],
        conclude: Command[None],
        reload: Callable[[], Awaitable[None]],
        publish: Callable[..., None],
    ) -> None:
        self._store = store
        self._settle = settle
        self._conclude = conclude
        self._reload = reload
        self._publish = publish
        self._queue: asyncio.Queue[_Asked | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._stale = False

    def start(self) -> None:
        """Begin to carry out commands."""
        self._task = asyncio.create_task(self._run(), name="det_core master: decisions")

    async def stop(self) -> None:
        """Finish the queued commands, and refuse later ones."""
        task = self._task
        self._task = None
        if task is not None:
            self._queue.put_nowait(None)
            await asyncio.gather(task, return_exceptions=True)

    async def do(self, command: Command[T]) -> T:
        """Carry out a command; returns what it returned, once all that it decided is in the store.

        Raises:
            MasterError: what the command raised, or :class:`Stopping`.
            StoreError: If the store cannot keep what it decided.
        """
        asked = _Asked(command, asyncio.get_running_loop().create_future())
        if self._task is None:
            self._refuse(asked)
        else:
            self._queue.put_nowait(asked)
        answer: T = await asked.answer
        return answer

    def post(self, command: Command[Any], delay: float = RETRY, known: str = "") -> None:
        """Carry out a command whose answer nobody waits for; retry it while it fails, and log each new cause.

        Args:
            command: Command.
            delay: Seconds until it is tried again.
            known: Message of its last failure.
        """
        loop = asyncio.get_running_loop()

        def on_answer(answer: asyncio.Future[Any]) -> None:
            if answer.cancelled():  # the loop is closing
                return
            error = answer.exception()
            if error is None or isinstance(error, Stopping) or getattr(error, "status", 500) < 500:
                return
            if isinstance(error, StoreError) and str(error) != known:
                LOG.warning("cannot store a decision, retrying: %s", error)
            loop.call_later(delay, self.post, command, min(2 * delay, MAX_RETRY_DELAY), str(error))

        asked = _Asked(command, loop.create_future(), known)
        asked.answer.add_done_callback(on_answer)
        if self._task is None:
            self._refuse(asked)
        else:
            self._queue.put_nowait(asked)

    async def refresh(self) -> None:
        """Make the live state anew from the store, and decide what follows from it."""

        def command(tx: Transaction) -> None:
            return

        self._stale = True
        await self.do(command)

    def _refuse(self, asked: _Asked) -> None:
        if not asked.answer.done():
            # 503, which clients try again.
            asked.answer.set_exception(Stopping("the master is about to stop; try again when it is there again"))

    async def _run(self) -> None:
        asked = await self._queue.get()
        while asked is not None:
            batch = []
            while asked is not None:
                batch.append(asked)
                # Those that wait share a transaction: a commit costs an fsync, whatever it holds.
                if len(batch) == MOST or self._queue.empty():
                    break
                asked = self._queue.get_nowait()
            await self._carry_out(batch)
            if asked is not None:
                asked = await self._queue.get()

    async def _carry_out(self, batch: list[_Asked]) -> None:
        try:
            await self._together(batch)
        except Exception as e:
            # The live state may hold half of a decision: it is read anew before the next one.
            self._stale = True
            if len(batch) == 1:
                _answer(batch[0], _explained(e, batch[0].known))
                return
            LOG.debug("a shared transaction failed, each command is tried alone: %s", e)
            for asked in batch:
                await self._carry_out([asked])

    async def _together(self, batch: list[_Asked]) -> None:
        """Carry out commands in one transaction. Whatever it raises, nothing of it was kept."""
        if self._stale:
            await self._reload()
            self._stale = False
        tx = Transaction()
        answers: list[tuple[_Asked, Any]] = []
        for asked in batch:
            try:
                answers.append((asked, asked.command(tx)))
            # A command refuses before it changes anything, so the others of the batch stand.
            except MasterError as e:
                answers.append((asked, e))
            self._settle(tx)
        self._conclude(tx)
        if tx.writes:
            await self._store.write(tx.commit)
        for effect in tx.effects:
            try:
                effect()
            except Exception:
                # What was written stands, so nothing may be carried out again, and the others must be done.
                LOG.exception("an effect of a decision failed; the decision stands")
        # Last: whoever is woken by it must find the effects done, such as the mark of a preemption.
        self._publish(*tx.topics)
        for asked, answer in answers:
            _answer(asked, answer)


def _answer(asked: _Asked, answer: Any) -> None:
    if asked.answer.done():
        return
    if isinstance(answer, Exception):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)


def _explained(error: Exception, known: str) -> Exception:
    if isinstance(error, (MasterError, StoreError)):  # the API answers 503, which clients try again
        return error
    wrapped = MasterError(f"the master could not carry this out: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    if str(wrapped) != known:
        LOG.error("the master could not carry out a request", exc_info=error)
    return wrapped
