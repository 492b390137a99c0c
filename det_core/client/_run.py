"""A run, as Python sees it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from det_core.client._table import flat, flat_batches
from det_core.journal import Record, Row, RunRecord, RunSummary, read_run


class Run:
    """One run. Its journal is read when it is first asked about, and again after :meth:`refresh`.

    Attributes:
        run_id: its id.
        path: its folder.
    """

    def __init__(self, summary: RunSummary) -> None:
        self._summary = summary
        self.run_id = summary.run_id
        self.path: Path = summary.path

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, name={self.name!r}, state={self.state!r})"

    @property
    def name(self) -> str:
        """What ``resume="latest"`` goes by: the name given to ``core.init()``, else the script's path."""
        return self._summary.name

    @property
    def created(self) -> float:
        """When it began, in seconds since the epoch."""
        return self._summary.created

    @property
    def argv(self) -> list[str]:
        """The command it was started with last."""
        return self._summary.argv

    @property
    def start(self) -> dict[str, Any]:
        """Its newest start: ``time``, ``host``, ``pid``, ``argv``, ``cwd`` and ``git`` (``commit`` and ``dirty``)."""
        return self._summary.last_start

    @property
    def detail(self) -> str | None:
        """What there is to say of its end, such as the error; None: nothing, or it has not ended."""
        ends = [end for end in self.record.records("run_end") if end.restart == self.restarts]
        return next((str(end["detail"]) for end in ends if end.get("detail")), None)

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters that ``core.init(hparams=)`` was given last."""
        return self.record.last_settings("hparams")

    @property
    def config(self) -> dict[str, Any]:
        """What ``ctx.set_config()`` was given last."""
        return self.record.last_settings("config")

    @property
    def settings(self) -> list[dict[str, Any]]:
        """``hparams`` and ``config`` of each start, with its number as ``restart``: a resume may change them."""
        hparams = self.record.settings("hparams")
        config = self.record.settings("config")
        return [{"restart": n, "hparams": hparams.get(n), "config": config.get(n)} for n in sorted({*hparams, *config})]

    @property
    def state(self) -> str:
        """``running``, ``completed``, ``stopped``, ``preempted``, ``failed``, ``incomplete``, ``unclosed`` or ``died``.

        ``incomplete``: reports are lost, as its disk did not take them or its journal was truncated; ``unclosed``: its
        script ended without closing the context; ``died``: it ended without a word; ``created``: it has not
        started yet, as after ``det-core slurm submit``.
        """
        return self._summary.state

    @property
    def restarts(self) -> int:
        """Number of times that it was resumed: 0 for a run that never was."""
        return max(self._summary.starts - 1, 0)

    @property
    def status(self) -> str | None:
        """The status that was set last."""
        return self.record.status

    @property
    def progress(self) -> float | None:
        """The progress that was reported last, from 0 to 1."""
        return self.record.progress

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was set last."""
        return self.record.metadata

    @property
    def storages(self) -> list[Any]:
        """The storages that it was given by any of its starts, as :attr:`storage` has them, each once.

        Empty where it kept all in its own folder, and for a trial, as what that keeps belongs to its experiment.
        """
        if self._summary.info.get("run_id", self.run_id) != self.run_id:
            return []
        found: list[Any] = []
        for start in self.record.records("run_start"):
            storage = start.get("storage")
            if start.rank == 0 and storage is not None and storage not in found:
                found.append(storage)
        return found

    @property
    def storage(self) -> Any:
        """Where it kept its checkpoints last, as ``core.init(checkpoint_storage=)`` takes it, without secrets.

        None: in its own folder.
        """
        starts = [start for start in self.record.records("run_start") if start.rank == 0]
        return starts[-1].get("storage") if starts else None

    @cached_property
    def record(self) -> RunRecord:
        """The journal, read."""
        return read_run(self.path)

    def refresh(self) -> Run:
        """Forget what was read, so that a run in progress is read anew; returns itself."""
        self._summary = RunSummary(self.path)
        self.__dict__.pop("record", None)
        return self

    def groups(self) -> list[str]:
        """The names of its metric groups."""
        return self.record.groups()

    def rows(self, group: str | None = None, *, superseded: bool = False, batches: bool = False) -> Iterator[Row]:
        """Its rows, one by one; see :meth:`metrics` for the arguments."""
        for name in self.groups() if group is None else [group]:
            yield from self.record.iter_rows(name, superseded=superseded, batches=batches)

    def metrics(self, group: str | None = None, *, superseded: bool = False, batches: bool = False) -> Any:
        """Its metrics as a table.

        Args:
            group: one metric group, such as ``"training"``; None: all of them.
            superseded: also the rows that were reported again after a resume, and a column that says so.
            batches: also the batch metrics, each batch a row, and a column with the batch's number.

        Returns:
            A pandas DataFrame where pandas is installed, else a list of dicts. Nested metrics have dots in
            their names; a metric called like one of the other columns is found as ``metrics.<name>``.
        """
        table: list[dict[str, Any]] = []
        for row in self.rows(group, superseded=superseded, batches=batches):
            table.append(flat(row, superseded=superseded, batches=batches))
            if batches:
                table.extend(flat_batches(row, superseded=superseded))
        if importlib.util.find_spec("pandas") is None:
            return table
        import pandas

        return pandas.DataFrame.from_records(table, columns=_columns(table))

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints that were registered and not deleted since, oldest first."""
        there = registered(self.record)
        return [_checkpoint(r) for r in self.record.records("checkpoint") if r.get("storage_id") in there]


def registered(run: RunRecord) -> set[str]:
    """The storage_ids of the checkpoints that a run has registered and that nobody has deleted since."""
    gone = {r.get("storage_id") for r in run.records("checkpoint_deleted") if not r.get("resources")}
    return {str(r["storage_id"]) for r in run.records("checkpoint") if "storage_id" in r} - gone


def _checkpoint(record: Record) -> dict[str, Any]:
    return {**record, "time": record.time, "restart": record.restart}


def _columns(table: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in table for name in row))
