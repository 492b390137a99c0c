"""Writers of a trial: how far the records of each process have come, and which rows of earlier attempts still count.

An attempt is a run of a trial, or a restart in it. The rules are those of the journal's own reader. In each group a row
is superseded by a later attempt that

- reported the same step (the reader of a series sees that without this module), or
- whose first row in that group has the same or a smaller step, or
- restored a checkpoint of a smaller step.

For rows of the one-report route the wire contract's rule (§5.2) holds: each row, not only the first, supersedes those
of earlier attempts from its step on, and those of other groups beyond its step. Rows without a step, and those of the
groups of :data:`SYSTEM`, are never superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Dialect, Text, select
from sqlalchemy.orm import Mapped, Session, mapped_column
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.types import TypeDecorator

from det_core.master.store.models import NO_STEP, Base, Reference, dumps, loads

REPORTED = -1
"""Rank of the rows of the one-report route, which has no ranks."""
SYSTEM = frozenset(["gpu", "cpu", "memory", "disk", "network"])
"""Groups of samples of the machine: never merged, never superseded."""

Attempt = tuple[int, int]
"""Run and restart; a later one goes on where an earlier one ended."""


@dataclass
class GroupSteps:
    """Steps that a writer has reported in a group; all None for a group whose rows have no step.

    All are minima and maxima, so that records may arrive again and in any order.

    Attributes:
        first_seq: Smallest sequence number of a row with a step.
        first: Step of that row.
        low: Smallest step.
        high: Largest step.
    """

    first_seq: int | None = None
    first: int | None = None
    low: int | None = None
    high: int | None = None

    def add(self, seq: int, step: int) -> None:
        """Take in a row."""
        if self.first_seq is None or seq < self.first_seq:
            self.first_seq = seq
            self.first = step
        if self.low is None or step < self.low:
            self.low = step
        if self.high is None or step > self.high:
            self.high = step


class _Groups(TypeDecorator[dict[str, GroupSteps]]):
    """Steps by group, as JSON text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, GroupSteps] | None, dialect: Dialect) -> str:
        return dumps({name: [s.first_seq, s.first, s.low, s.high] for name, s in (value or {}).items()})

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, GroupSteps]:
        return {name: GroupSteps(*steps) for name, steps in loads(value or "{}").items()}


class Writer(Base, kw_only=True):
    """One reporting process of a trial; or, with the rank :data:`REPORTED`, the one-report route of a run.

    Attributes:
        next_seq: Sequence number after the largest that was received.
        restored: Smallest step of a checkpoint that it restored, or None.
        groups: Steps by group; a group without any was reported without steps.
    """

    __tablename__ = "writers"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trial_id: Mapped[int] = mapped_column(Reference, primary_key=True)
    run_id: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    next_seq: Mapped[int] = mapped_column(default=0)
    restored: Mapped[int | None] = mapped_column(default=None)
    groups: Mapped[dict[str, GroupSteps]] = mapped_column(_Groups, default_factory=dict)

    @property
    def attempt(self) -> Attempt:
        """Attempt that it belongs to."""
        return self.run_id, self.restart

    def add(self, group: str, seq: int, step: int) -> None:
        """Take in a row of a group; ``step`` is NO_STEP for a row without one."""
        steps = self.groups.setdefault(group, GroupSteps())
        if step != NO_STEP:
            steps.add(seq, step)
        self.next_seq = max(self.next_seq, seq + 1)

    def add_restore(self, step: int) -> None:
        """Take in that it restored a checkpoint of a step."""
        self.restored = step if self.restored is None else min(step, self.restored)

    def begins(self, group: str) -> int:
        """Return the step from which on it supersedes earlier attempts in a group; NO_STEP if it does not."""
        begins = NO_STEP if self.restored is None else self.restored + 1
        for name, steps in self.groups.items():
            if steps.first is None or steps.low is None or name in SYSTEM:
                continue
            if self.rank != REPORTED:
                begins = min(begins, steps.first) if name == group else begins
            else:
                begins = min(begins, steps.low if name == group else steps.low + 1)
        return begins

    def starts(self) -> Any:
        """Return all that :meth:`begins` depends on, to compare."""
        return self.restored, {name: (steps.first, steps.low) for name, steps in self.groups.items()}


class Visible:
    """Decides which rows of one trial count.

    Args:
        writers: All writers of the trial.
    """

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = sorted(writers, key=lambda writer: writer.attempt, reverse=True)
        self._limits: dict[str, dict[Attempt, int]] = {}

    def beyond(self, group: str, attempt: Attempt) -> int:
        """Return the step from which on this attempt's rows of the group are superseded; NO_STEP if none are."""
        limits = self._limits.get(group)
        if limits is None:
            limits = self._limits[group] = self._limits_of(group)
        return limits.get(attempt, NO_STEP)

    def _limits_of(self, group: str) -> dict[Attempt, int]:
        limits: dict[Attempt, int] = {}
        if group in SYSTEM:
            return limits
        limit = NO_STEP  # set by all later attempts
        current: Attempt | None = None
        following = NO_STEP  # set by the current attempt as well
        for writer in self._writers:
            if writer.attempt != current:
                limit = following
                current = writer.attempt
            limits[writer.attempt] = limit
            following = min(following, writer.begins(group))
        return limits


def load(session: Session, trial_id: int, run_id: int, restart: int, rank: int) -> Writer:
    """Return a writer as it is stored, or a new one."""
    stored = session.get(Writer, (trial_id, run_id, restart, rank))
    return Writer(trial_id=trial_id, run_id=run_id, restart=restart, rank=rank) if stored is None else stored


def save(session: Session, writer: Writer) -> None:
    """Store a writer."""
    session.add(writer)
    flag_modified(writer, "groups")  # changed in place


def of_trial(session: Session, trial_id: int) -> Sequence[Writer]:
    """Return the writers of a trial."""
    return session.scalars(select(Writer).where(Writer.trial_id == trial_id)).all()
