"""A training read back from its home: rows, checkpoints and what the probe has noted, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from det_core.check_resume._trainings import Start
from det_core.journal import RunRecord, list_runs, read_run

Rows = dict[str, dict[int, dict[str, Any]]]
"""Values by group, step and key; of nested metrics the key is a path with dots."""


@dataclass(frozen=True)
class Save:
    """A checkpoint that was committed.

    Attributes:
        restart: the start that wrote it.
        steps_completed: what its metadata says.
        reported: the largest step that had been reported when it was begun.
        calls, forwards: how many should_preempt() calls and training batches there had been in that start.
        path: its folder.
    """

    storage_id: str
    restart: int
    steps_completed: int
    reported: int
    calls: int
    forwards: int
    path: Path


@dataclass(frozen=True)
class Training:
    """One of the trainings of a check.

    Attributes:
        name: what it is called in findings.
        starts: its starts of the command.
        runs: how many runs are in its home.
        sizes: numbers of ranks, by start, as far as a start came to ``core.init()``.
        rows: the rows that stand at the end.
        batches: their values by batch, where they were reported with them.
        order: their groups and steps in the order in which they were reported.
        reported: groups and steps of all rows, by start.
        saves: the checkpoints that were committed, in order.
        restored: by restart, the storage_id that was restored.
    """

    name: str
    starts: tuple[Start, ...]
    runs: int = 1
    sizes: tuple[int, ...] = ()
    rows: Rows = field(default_factory=dict)
    batches: Mapping[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    order: tuple[tuple[str, int], ...] = ()
    reported: Mapping[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    saves: tuple[Save, ...] = ()
    restored: Mapping[int, str] = field(default_factory=dict)

    @property
    def main_group(self) -> str:
        """The group with the most rows."""
        return max(self.rows, key=lambda group: len(self.rows[group]), default="training")

    def steps(self, group: str) -> list[int]:
        """Return the steps of a group, ascending."""
        return sorted(self.rows.get(group, {}))

    def save_restored(self, restart: int) -> Save | None:
        """Return the checkpoint that a start has restored."""
        return next((save for save in self.saves if save.storage_id == self.restored.get(restart)), None)


@dataclass(frozen=True)
class ReportedRow:
    """A row as it was reported.

    Attributes:
        group, step: its place.
        metrics: its values, by key.
        batches: its values by batch; None or empty: it has none.
        restart: the start that reported it.
        stands: whether no later start has superseded it.
    """

    group: str
    step: int
    metrics: Mapping[str, Any]
    batches: list[dict[str, Any]] | None
    restart: int
    stands: bool


def read_training(name: str, home: Path, starts: tuple[Start, ...]) -> Training:
    """Read a bare training from its home; of several runs the oldest."""
    runs = list_runs(home)
    if not runs:
        return Training(name, starts, runs=0)
    run = read_run(runs[-1].path)
    sizes = {record.restart: int(record["size"]) for record in run.records("run_start") if record.rank == 0}
    training = Training(
        name, starts, len(runs), tuple(sizes[restart] for restart in sorted(sizes)), saves=tuple(_saves(run, starts)),
        restored={record.restart: str(record["storage_id"]) for record in run.records("restore")},
    )  # fmt: skip
    return with_rows(training, _rows(run))


def with_rows(training: Training, found: Iterable[ReportedRow]) -> Training:
    """Return a training with its rows, which are given in the order in which they were reported."""
    rows: Rows = {}
    batches: dict[tuple[str, int], list[dict[str, Any]]] = {}
    order: list[tuple[str, int]] = []
    reported: dict[int, list[tuple[str, int]]] = {}
    for row in found:
        place = (row.group, row.step)
        reported.setdefault(row.restart, []).append(place)
        if row.stands:
            rows.setdefault(row.group, {})[row.step] = dict(flatten(row.metrics))
            order.append(place)
            if row.batches:
                batches[place] = row.batches
    return replace(
        training, rows=rows, batches=batches, order=tuple(order),
        reported={restart: tuple(places) for restart, places in reported.items()},
    )  # fmt: skip


def _rows(run: RunRecord) -> Iterator[ReportedRow]:
    found = [
        row
        for group in run.groups()
        for row in run.iter_rows(group, superseded=True, batches=True)
        if row.steps_completed is not None  # the profiler's have none
    ]
    for row in sorted(found, key=lambda row: (row.restart, row.rank, row.seq)):
        assert row.steps_completed is not None
        yield ReportedRow(
            row.group, row.steps_completed, row.metrics, row.batch_metrics, row.restart, not row.superseded
        )


def _saves(run: RunRecord, starts: tuple[Start, ...]) -> Iterator[Save]:
    for record in run.records("checkpoint"):
        storage_id = str(record["storage_id"])
        path = run.path / "checkpoints" / storage_id
        yield save_of(storage_id, record.restart, int(record["steps_completed"]), path, starts)


def save_of(storage_id: str, restart: int, steps_completed: int, path: Path, starts: tuple[Start, ...]) -> Save:
    """Return a checkpoint with what the probe has noted of it."""
    noted = {note["storage_id"]: note for start in starts for note in start.noted("save")}
    note = noted.get(storage_id, {"step": -1, "calls": 0, "forwards": 0})
    return Save(storage_id, restart, steps_completed, note["step"], note["calls"], note["forwards"], path)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values at any depth, with their paths."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, join_path(path, key))
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield from flatten(item, join_path(path, number))
    else:
        yield path, value


def join_path(path: str, key: Any) -> str:
    """Return the path of an item at a key of the value at a path, which is empty for the root."""
    if not path:
        return str(key)
    return f"{path}.{key}"
