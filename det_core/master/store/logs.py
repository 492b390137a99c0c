"""Log lines of tasks, in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from det_core.master.store._rows import many
from det_core.master.store._schema import LOGS


@dataclass(frozen=True)
class LogRow:
    """One line of a task's log; ``id`` grows with each line of all tasks, and is never used again."""

    id: int
    task_id: str
    allocation_id: str | None
    agent_id: str | None
    container_id: str | None
    rank: int | None
    timestamp: float
    level: str
    stdtype: str
    source: str
    log: str


@dataclass(frozen=True)
class LogLine:
    """A line to be kept.

    Attributes:
        task_id: whose line it is.
        log: its text.
        timestamp: when it was written, in seconds since the epoch.
        level: INFO, ERROR, …
        stdtype: stdout or stderr.
        source: such as task or master.
    """

    task_id: str
    log: str
    timestamp: float
    allocation_id: str | None = None
    agent_id: str | None = None
    container_id: str | None = None
    rank: int | None = None
    level: str = "INFO"
    stdtype: str = "stdout"
    source: str = "task"


def append(session: Session, lines: Sequence[LogLine]) -> None:
    """Insert lines, in their order."""
    if lines:
        session.execute(LOGS.insert(), [vars(line) for line in lines])


def after(session: Session, task_id: str, line_id: int = 0, *, limit: int = 1000) -> list[LogRow]:
    """Lines of a task with ids above ``line_id``, in order, at most ``limit``."""
    where = (LOGS.c.task_id == task_id) & (LOGS.c.id > min(line_id, 2**63 - 1))
    return many(session, select(LOGS).where(where).order_by(LOGS.c.id).limit(limit), LogRow)


def last(session: Session, task_id: str, *, limit: int = 20) -> list[LogRow]:
    """The last lines of a task, in order."""
    statement = select(LOGS).where(LOGS.c.task_id == task_id).order_by(LOGS.c.id.desc()).limit(limit)
    return many(session, statement, LogRow)[::-1]


def last_id(session: Session, task_id: str) -> int:
    """The id of a task's last line; 0 if it has none."""
    return int(session.execute(select(func.max(LOGS.c.id)).where(LOGS.c.task_id == task_id)).scalar() or 0)
