"""Who reports: the processes of a trial, how far their records have come, and what their first steps were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from det_core.master.store._reports import WRITERS
from det_core.master.store._rows import put
from det_core.master.store._tally import Tally, take_in
from det_core.master.store._types import dumps, loads

REPORTED = -1
"""Stands as the rank of what came by the one-report route, which has no ranks."""
SYSTEM = frozenset(["gpu", "cpu", "memory", "disk", "network"])
"""Groups of samples of the machine: never merged, never superseded."""

MOST_KEYS = 2000
"""Keys of a group of which totals are kept; where there are more, they are counted when somebody asks."""

Attempt = tuple[int, int]
"""(run, restart): a later one goes on where an earlier one ended."""


@dataclass
class Group:
    """What one writer has reported in a group.

    Attributes:
        rows: how many rows, of which ``loose`` have no step.
        first_seq: the smallest sequence number of a row with a step, and ``first`` that row's step.
        low: the smallest step.
        high: the largest step.
        in_order: whether the rows came in the order of the series, so that ``tallies`` hold.
        tallies: key -> running totals.
    """

    rows: int = 0
    loose: int = 0
    first_seq: int | None = None
    first: int | None = None
    low: int | None = None
    high: int | None = None
    in_order: bool = True
    tallies: dict[str, Tally] = field(default_factory=dict)

    def note(self, seq: int, step: int | None, *, late: bool = False) -> None:
        """A row is new; ``late``: others of a larger number came before it."""
        self.rows += 1
        if late:
            self.in_order = False
        if step is None:
            self.loose += 1
            self.in_order = self.in_order and self.high is None
            return
        if self.first_seq is None or seq < self.first_seq:
            self.first_seq, self.first = seq, step
        if self.high is None or self.low is None:
            self.low = self.high = step
            self.in_order = self.in_order and not self.loose
        elif step >= self.high:
            self.high = step
        else:
            self.in_order = False
            self.low = min(self.low, step)

    def count(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the numbers of new rows to the totals, as long as these hold and are not too many."""
        if self.in_order:
            take_in(self.tallies, rows)
        if not self.in_order or len(self.tallies) > MOST_KEYS:
            self.in_order, self.tallies = False, {}


@dataclass
class Writer:
    """One process of a trial that reports; or, with the rank ``REPORTED``, a run's one-report route."""

    trial_id: int
    run_id: int
    restart: int
    rank: int
    next_seq: int = 0
    restored: int | None = None
    groups: dict[str, Group] = field(default_factory=dict)

    def group(self, name: str) -> Group:
        """What it has reported in a group, so far."""
        known = self.groups.get(name)
        if known is None:
            known = self.groups[name] = Group()
        return known

    @property
    def attempt(self) -> Attempt:
        """The attempt it belongs to."""
        return self.run_id, self.restart


def load(conn: Connection, trial_id: int, run_id: int, restart: int, rank: int) -> Writer:
    """A writer as it is known, or a new one."""
    w = WRITERS.c
    where = (w.trial_id == trial_id) & (w.run_id == run_id) & (w.restart == restart) & (w.rank == rank)
    row = conn.execute(select(WRITERS).where(where)).one_or_none()
    return Writer(trial_id, run_id, restart, rank) if row is None else _writer(row)


def save(conn: Connection, writer: Writer) -> None:
    """Keep what is known of a writer."""
    groups = {
        name: [g.rows, g.loose, g.first_seq, g.first, g.low, g.high, g.in_order, g.tallies]
        for name, g in writer.groups.items()
    }
    put(conn, WRITERS, {**vars(writer), "groups": dumps(groups)})


def of_trials(conn: Connection, trial_ids: Sequence[int]) -> dict[int, list[Writer]]:
    """Trial -> its writers."""
    found: dict[int, list[Writer]] = {trial: [] for trial in trial_ids}
    for start in range(0, len(trial_ids), 500):
        wanted = WRITERS.c.trial_id.in_(trial_ids[start : start + 500])
        for row in conn.execute(select(WRITERS).where(wanted)):
            found[row.trial_id].append(_writer(row))
    return found


def of_trial(conn: Connection, trial_id: int) -> list[Writer]:
    """The writers of one trial."""
    return of_trials(conn, [trial_id])[trial_id]


def _writer(row: Any) -> Writer:
    groups = {name: Group(*values) for name, values in loads(row.groups).items()}
    return Writer(row.trial_id, row.run_id, row.restart, row.rank, row.next_seq, row.restored, groups)
