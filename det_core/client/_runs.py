"""Runs of this machine that had no master: found by their IDs, and read back.

This module imports neither storage nor pandas, which would double the time of ``det-core runs list``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core.client._table import flatten_batches, flatten_row, to_frame
from det_core.errors import RunNotFound
from det_core.journal import Record, Row, RunRecord, RunSummary, list_runs, match_run_id, read_run

LATEST = "latest"
"""Name of the newest of several things."""


def runs(home: Path | str | None = None) -> list[Run]:
    """Return all runs, newest first.

    Args:
        home: Directory in which runs are kept. Defaults to ``DET_CORE_HOME``, else the platform's user data directory.
    """
    return [Run(summary) for summary in list_runs(home_of(home))]


def run(run_id: str, home: Path | str | None = None) -> Run:
    """Return one run.

    Args:
        run_id: ID, the beginning of one, or ``"latest"``.
        home: See :func:`runs`.

    Raises:
        RunNotFound: If no run has that name, or several begin with it.
    """
    return Run(find(run_id, home))


class Run:
    """A run. Its journal is read when it is first asked about, and again after :meth:`refresh`.

    Attributes:
        run_id: ID.
        path: Directory of the run.
    """

    def __init__(self, summary: RunSummary) -> None:
        self._summary = summary
        self.run_id = summary.run_id
        self.path: Path = summary.path

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, name={self.name!r}, state={self.state!r})"

    @property
    def name(self) -> str:
        """Name that ``resume="latest"`` looks for: the one given to ``core.init()``, else the script's path."""
        return self._summary.name

    @property
    def created(self) -> float:
        """Time of its first start, in seconds since the epoch."""
        return self._summary.created

    @property
    def argv(self) -> list[str]:
        """Command of its last start."""
        return self._summary.argv

    @property
    def start(self) -> dict[str, Any]:
        """Its last start: ``time``, ``host``, ``pid``, ``argv``, ``cwd`` and ``git`` (``commit`` and ``dirty``)."""
        return self._summary.last_start

    @property
    def detail(self) -> str | None:
        """Cause of its end, such as an error; None if nothing is recorded, or it has not ended."""
        ends = (end for end in self.record.records("run_end") if end.restart == self.restarts)
        return next((str(end["detail"]) for end in ends if end.get("detail")), None)

    @property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters given to the last ``core.init(hparams=)``."""
        return self.record.last_settings("hparams")

    @property
    def config(self) -> dict[str, Any]:
        """Configuration given to the last ``ctx.set_config()``."""
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
        script ended without closing the context; ``died``: it ended without a record of why; ``created``: it has not
        started yet, as after ``det-core slurm submit``.
        """
        return self._summary.state

    @property
    def restarts(self) -> int:
        """Number of times that it was resumed: 0 for a run that never was."""
        return max(self._summary.starts - 1, 0)

    @property
    def status(self) -> str | None:
        """Status that was set last."""
        return self.record.status

    @property
    def progress(self) -> float | None:
        """Progress that was reported last, from 0 to 1."""
        return self.record.progress

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that was set last."""
        return self.record.metadata

    @property
    def storages(self) -> list[Any]:
        """Storages given to any of its starts, as :attr:`storage` has them, each once.

        Empty if it kept all in its own directory, and for a trial, whose storage belongs to its experiment.
        """
        if self._summary.info.get("run_id", self.run_id) != self.run_id:
            return []
        storages: list[Any] = []
        for storage in self._storages_of_starts():
            if storage is not None and storage not in storages:  # mappings cannot be hashed
                storages.append(storage)
        return storages

    @property
    def storage(self) -> Any:
        """Storage of its checkpoints at its last start, as ``core.init(checkpoint_storage=)`` takes it; no secrets.

        None: its own directory.
        """
        return next(reversed(self._storages_of_starts()), None)

    @cached_property
    def record(self) -> RunRecord:
        """Its journal, read."""
        return read_run(self.path)

    def refresh(self) -> Run:
        """Forget what was read, so that a run in progress is read anew; return the run."""
        self._summary = RunSummary(self.path)
        self.__dict__.pop("record", None)
        return self

    def groups(self) -> list[str]:
        """Return the names of its metric groups."""
        return self.record.groups()

    def rows(self, group: str | None = None, *, superseded: bool = False, batches: bool = False) -> Iterator[Row]:
        """Yield its rows; see :meth:`metrics` for the arguments."""
        for name in self.groups() if group is None else [group]:
            yield from self.record.iter_rows(name, superseded=superseded, batches=batches)

    def metrics(self, group: str | None = None, *, superseded: bool = False, batches: bool = False) -> Any:
        """Return its metrics as a table.

        Args:
            group: Metric group, such as ``"training"``. Defaults to all.
            superseded: Whether to add rows that were reported again after a resume, and a column that says so.
            batches: Whether to add batch metrics, a row for each batch, and a column with the batch's number.

        Returns:
            A pandas DataFrame if pandas is installed, else a list of dicts. Nested metrics have dots in their names;
            a metric with the name of another column becomes ``metrics.<name>``.
        """
        table: list[dict[str, Any]] = []
        for row in self.rows(group, superseded=superseded, batches=batches):
            table.append(flatten_row(row, superseded=superseded, batches=batches))
            if batches:
                table.extend(flatten_batches(row, superseded=superseded))
        return to_frame(table)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints that were registered and not deleted since, oldest first."""
        present = registered(self.record)
        return [_describe(r) for r in self.record.records("checkpoint") if r.get("storage_id") in present]

    def _storages_of_starts(self) -> list[Any]:
        # Every rank records its start; the chief's names the storage of the whole run.
        return [start.get("storage") for start in self.record.records("run_start") if start.rank == 0]


def home_of(home: Path | str | None) -> Path:
    """Return the home directory to look in; with None the one of the environment."""
    if home is None:
        return Environment.read().home
    return Path(home).expanduser().absolute()


def find(run_id: str, home: Path | str | None = None) -> RunSummary:
    """Return the run that an ID, the beginning of one or ``latest`` (of any name) means.

    Raises:
        RunNotFound: If no run has that name, or several begin with it.
    """
    folder = home_of(home)
    summaries = list_runs(folder)
    if not summaries:
        raise RunNotFound(f"no runs in {folder / 'runs'}")
    if run_id == LATEST:
        return summaries[0]
    by_id = {summary.run_id: summary for summary in summaries}
    return by_id[match_run_id(run_id, by_id, folder / "runs")]


def run_folder(run_id: str, home: Path | str | None) -> Path | None:
    """Return the directory of the run with this ID, or None if it is not kept here."""
    try:
        summary = find(run_id, home)
    except RunNotFound:
        return None
    # find() takes the beginning of an ID, too: that would be another run.
    return summary.path if summary.run_id == run_id else None


def registered(record: RunRecord) -> set[str]:
    """Return the storage IDs of checkpoints that a run has registered and that were not deleted since."""
    # A deletion that leaves resources has deleted some of the files only.
    deleted = {r.get("storage_id") for r in record.records("checkpoint_deleted") if not r.get("resources")}
    return {str(r["storage_id"]) for r in record.records("checkpoint") if "storage_id" in r} - deleted


def _describe(record: Record) -> dict[str, Any]:
    return {**record, "time": record.time, "restart": record.restart}
