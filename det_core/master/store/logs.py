"""Log lines of tasks, in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from det_core.master.store.models import Log


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
        session.connection().execute(insert(Log), [vars(line) for line in lines])


def after(session: Session, task_id: str, line_id: int = 0, *, limit: int = 1000) -> Sequence[Log]:
    """Return lines of a task with IDs above ``line_id``, in order, at most ``limit``."""
    chosen = (Log.task_id == task_id) & (Log.id > min(line_id, 2**63 - 1))
    return session.scalars(select(Log).where(chosen).order_by(Log.id).limit(limit)).all()


def last(session: Session, task_id: str, *, limit: int = 20) -> Sequence[Log]:
    """Return the last lines of a task, in order."""
    statement = select(Log).where(Log.task_id == task_id).order_by(Log.id.desc()).limit(limit)
    return session.scalars(statement).all()[::-1]


def last_id(session: Session, task_id: str) -> int:
    """Return the ID of a task's last line; 0 if it has none."""
    return session.scalar(select(func.max(Log.id)).where(Log.task_id == task_id)) or 0
