"""A run read back: its rows as series, its other records, its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.errors import RunError, RunNotFound
from det_core.journal._folder import INFO, count_restarts, is_live, journal_files, read_info, run_paths

if TYPE_CHECKING:
    from det_core.journal._supersede import Supersession


@dataclass(frozen=True)
class Row:
    """One row of a series.

    Attributes:
        group: its metric group.
        steps_completed: its step; None for rows that belong to none.
        metrics: values by key.
        time: when it was reported, in seconds since the epoch.
        restart: the restart it was made in.
        rank: the (lowest) rank that reported it.
        seq: its place among that rank's records.
        superseded: whether a later restart took its place.
        conflicts: keys to which several ranks gave different values; the lowest rank's is shown.
        batch_metrics: what was given per batch, where asked for.
    """

    group: str
    steps_completed: int | None
    metrics: dict[str, Any]
    time: float
    restart: int
    rank: int
    seq: int
    superseded: bool = False
    conflicts: tuple[str, ...] = ()
    batch_metrics: list[dict[str, Any]] | None = None


class Record(Mapping[str, Any]):
    """A record that is no metrics row: its body as a mapping, and where it stands.

    Attributes:
        kind: such as ``checkpoint``.
        time: when it was made, in seconds since the epoch.
        restart: the restart it was made in.
        rank: the rank that made it.
        seq: its place among that rank's records.
    """

    __slots__ = ("_body", "kind", "rank", "restart", "seq", "time")

    def __init__(self, restart: int, rank: int, record: Mapping[str, Any]) -> None:
        self.kind: str = record["kind"]
        self.time: float = record["time"]
        self.restart, self.rank, self.seq = restart, rank, int(record["seq"])
        self._body: dict[str, Any] = record["body"]

    def __getitem__(self, key: str) -> Any:
        return self._body[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._body)

    def __len__(self) -> int:
        return len(self._body)

    def __repr__(self) -> str:
        return f"Record({self.kind}, restart={self.restart}, rank={self.rank}, seq={self.seq}, {self._body!r})"


class RunSummary:
    """What is known of a run without reading its journals.

    Args:
        path: the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.run_id = self.path.name

    @cached_property
    def info(self) -> dict[str, Any]:
        """What run.json says: name, command, restarts."""
        return read_info(self.path)

    @property
    def name(self) -> str:
        """What ``latest`` goes by."""
        return str(self.info.get("name", ""))

    @property
    def created(self) -> float:
        """When the run began, in seconds since the epoch; 0 where nothing says."""
        return float(self.info.get("created", 0.0))

    @property
    def ended(self) -> float | None:
        """When the chief of the last restart said that it ends; None: it did not, or goes on."""
        from det_core.journal._read import last_record

        end = None if self.live else last_record(self.path, self.restarts - 1, 0, "run_end")
        return None if end is None else float(end["time"])

    @property
    def live(self) -> bool:
        """Whether a process is writing it now."""
        return is_live(self.path)

    @property
    def restarts(self) -> int:
        """How often the run was started; 1 for one that was never resumed."""
        return count_restarts(self.path, self.info)

    @property
    def state(self) -> str:
        """``running``, or how the last restart ended, from what each of its ranks has said last.

        ``completed``, ``stopped`` (the script asked for it), ``preempted``, ``interrupted`` or ``invalid_hp``;
        ``failed`` if any rank failed; ``died`` if any rank ended without a word.
        """
        if self.live:
            return "running"
        from det_core.journal._read import last_record

        last = self.restarts - 1
        ranks = {0} | {rank for restart, rank, *_ in journal_files(self.path) if restart == last}
        ends = [last_record(self.path, last, rank, "run_end") for rank in sorted(ranks)]
        outcomes = ["died" if end is None else str(end["body"].get("outcome", "completed")) for end in ends]
        return next((bad for bad in ("failed", "died") if bad in outcomes), outcomes[0])


class RunRecord(RunSummary):
    """A run, as it was when this object was made. Rows are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        from det_core.journal._read import scan

        super().__init__(path)
        self._scan = scan(self.path)
        self.torn_lines = self._scan.torn_lines
        """Lines that hold no whole record."""

    def groups(self) -> list[str]:
        """The names of the metric groups, sorted."""
        return sorted(self._scan.places)

    def count(self, group: str) -> int:
        """How many rows were written to a group, superseded ones and parts of merged ones included."""
        return len(self._scan.places.get(group, ()))

    def rows(self, group: str, *, superseded: bool = False, batches: bool = False) -> list[Row]:
        """The series of a group: rows by restart and step; see :meth:`iter_rows`."""
        return list(self.iter_rows(group, superseded=superseded, batches=batches))

    def iter_rows(self, group: str, *, superseded: bool = False, batches: bool = False) -> Iterator[Row]:
        """Read the series of a group row by row, without holding it in memory.

        Args:
            group: a metric group; an unknown one has no rows.
            superseded: also the rows that a later restart took the place of; without them no step occurs twice.
            batches: also the batch metrics.
        """
        from det_core.journal._series import read, series

        places = self._scan.places.get(group)
        if places is not None:
            found = series(places, group, self._supersession, superseded=superseded)
            yield from read(found, group, places, self._scan.files, batches=batches)

    def last(self, group: str) -> tuple[int, Row | None]:
        """How many rows the series of a group has, and the last of them; reads no other."""
        from det_core.journal._series import read, series

        places = self._scan.places.get(group)
        if places is None:
            return 0, None
        count, found = 0, None
        for found in series(places, group, self._supersession, superseded=False):  # noqa: B007
            count += 1
        rows = read([found] if found else [], group, places, self._scan.files, batches=False)
        return count, next(rows, None)

    def records(self, kind: str) -> list[Record]:
        """All records of a kind, oldest restart first, within it by time."""
        found = [Record(restart, rank, r) for restart, rank, r in self._scan.records if r["kind"] == kind]
        return sorted(found, key=lambda r: (r.restart, r.time, r.rank, r.seq))

    @property
    def status(self) -> str | None:
        """The status set last."""
        status = self._last("status", "status")
        return None if status is None else str(status)

    @property
    def metadata(self) -> dict[str, Any]:
        """The run's metadata, as set last."""
        return dict(self._last("metadata", "metadata") or {})

    @property
    def progress(self) -> float | None:
        """The progress reported last."""
        fraction = self._last("progress", "fraction")
        return float(fraction) if isinstance(fraction, (int, float)) else None

    def _last(self, kind: str, key: str) -> Any:
        records = self.records(kind)
        return records[-1].get(key) if records else None

    @cached_property
    def _supersession(self) -> Supersession:
        from det_core.journal._read import first_steps
        from det_core.journal._supersede import Supersession

        first = {group: first_steps(places) for group, places in self._scan.places.items()}
        restored: dict[int, int] = {}
        for r in self.records("restore"):
            step = r.get("steps_completed")
            if isinstance(step, int):
                restored[r.restart] = min(step, restored.get(r.restart, step))
        return Supersession(first, restored)


def read_run(folder: Path | str) -> RunRecord:
    """Read a run from its folder.

    Raises:
        RunNotFound: there is no such folder, or nothing of a run in it.
    """
    path = Path(folder)
    if not (path / INFO).exists() and next(journal_files(path), None) is None:
        raise RunNotFound(f"no run in {path}")
    return RunRecord(path)


def list_runs(home: Path | str) -> list[RunSummary]:
    """The runs of a home folder, newest first, without reading their journals.

    Raises:
        RunError: that is no folder, or must not be read; the message gives path and reason.
    """
    try:
        paths = run_paths(Path(home))
    except OSError as e:
        raise RunError(f"no runs can be read in {home}: {e.strerror}. Set DET_CORE_HOME to a folder of yours") from None
    return [
        p for p in map(RunSummary, paths) if (p.path / INFO).exists() or next(journal_files(p.path), None) is not None
    ]
