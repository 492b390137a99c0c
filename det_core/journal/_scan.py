"""Read a run back: the journals of all its processes as series, records and a state.

All files of a run are read once, line by line, whatever state they are in. Of a row only its position is kept, a few
dozen bytes however large it is, and it is read again on request. Then the rules decide which rows of a resumed run
still count.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import lt
from pathlib import Path
from typing import Any

from det_core._json import equal_json
from det_core.errors import RunNotFound
from det_core.journal._run_folder import (
    INFO_FILE,
    count_starts,
    is_live,
    journal_files,
    open_file,
    read_info,
    run_paths,
)
from det_core.journal._values import to_json_dict

NO_STEP = -1
"""Step of rows without one, in a column of integers."""
TAIL_BYTES = 65536
"""Bytes at the end of a file that are searched for its last records."""
SERIES_TAIL_BYTES = 8 * 2**20
"""Bytes at the end of a file that are searched for the rows before a checkpoint: some 50,000 of ten metrics."""


@dataclass(frozen=True)
class Row:
    """One row of a series.

    Attributes:
        group: its metric group.
        steps_completed: its step, or None.
        metrics: values by key.
        time: time of the report, in seconds since the epoch.
        restart: restart that reported it.
        rank: the (lowest) rank that reported it.
        seq: its place among that rank's records.
        superseded: whether a later restart replaced it.
        conflicts: keys with different values at this step, from several ranks or much later from one; ``metrics`` has
            the lowest rank's first value.
        batch_metrics: values per batch, if requested.
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

    def line(self, *, superseded: bool = False) -> bytes:
        """Return the row as a line of JSON for a stand-alone file, with restart and rank.

        Args:
            superseded: whether the line has the field ``superseded``.
        """
        from det_core.journal._format import encode

        record: dict[str, Any] = {
            "group": self.group,
            "steps_completed": self.steps_completed,
            "time": self.time,
            "restart": self.restart,
            "rank": self.rank,
            "metrics": self.metrics,
        }
        if superseded:
            record["superseded"] = self.superseded
        if self.batch_metrics is not None:
            record["batch_metrics"] = self.batch_metrics
        return encode(*to_json_dict(record))


class Record(Mapping[str, Any]):
    """A record that is not a metrics row: its body as a mapping, and its origin.

    Attributes:
        kind: such as ``checkpoint``.
        time: time of the record, in seconds since the epoch.
        restart: restart that wrote it.
        rank: rank that wrote it.
        seq: its place among that rank's records.
    """

    __slots__ = ("_body", "kind", "rank", "restart", "seq", "time")

    def __init__(self, restart: int, rank: int, record: Mapping[str, Any]) -> None:
        self.kind: str = record["kind"]
        self.time: float = record["time"]
        self.restart = restart
        self.rank = rank
        self.seq = int(record["seq"])
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
    """The facts of a run that need no reading of its journals.

    Args:
        path: the run's directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.run_id = self.path.name

    @cached_property
    def info(self) -> dict[str, Any]:
        """Content of run.json: name, command, restarts."""
        return read_info(self.path)

    @property
    def name(self) -> str:
        """The name by which ``latest`` finds the run."""
        return str(self.info.get("name", ""))

    @property
    def created(self) -> float:
        """Time of creation in seconds since the epoch; 0 if unknown."""
        return float(self.info.get("created", 0.0))

    @property
    def last_start(self) -> dict[str, Any]:
        """Facts of the newest start in run.json: time, host, pid, argv, cwd and git, as far as known."""
        starts = self.info.get("restarts") or [{}]
        # Earlier versions recorded argv and cwd once for the run.
        return {"argv": self.info.get("argv", []), "cwd": self.info.get("cwd"), **starts[-1]}

    @property
    def argv(self) -> list[str]:
        """The command of the newest start."""
        return list(self.last_start["argv"])

    @property
    def ended(self) -> float | None:
        """Time at which the chief of the last restart recorded its end; None without such a record, or if the run is
        live."""
        if self.live or (end := self._end_of(self.starts - 1, 0)) is None:
            return None
        return float(end["time"])

    @property
    def live(self) -> bool:
        """Whether a process is writing the run now."""
        return is_live(self.path)

    @property
    def starts(self) -> int:
        """Number of starts: 1 for a run that was never resumed."""
        return count_starts(self.path, self.info)

    @property
    def state(self) -> str:
        """``running``, or the outcome of the last restart, from the last record of each of its ranks.

        ``completed``, ``stopped`` (by the script), ``preempted``, ``interrupted`` or ``invalid_hp``; ``failed`` if any
        rank failed; ``died`` if any rank ended without a record; ``incomplete`` if any rank lost reports; ``unclosed``
        if any rank's script ended without closing its context. ``created``: the run has not started yet.
        """
        if self.live:
            return "running"
        last = self.starts - 1
        if last < 0:
            return "created"
        ranks = {0} | {rank for restart, rank in journal_files(self.path) if restart == last}
        ends = [self._end_of(last, rank) for rank in sorted(ranks)]
        # A dead process cannot record its end.
        outcomes = ["died" if end is None else str(end["body"].get("outcome", "completed")) for end in ends]
        return next((bad for bad in ("failed", "died", "incomplete", "unclosed") if bad in outcomes), outcomes[0])

    def _end_of(self, restart: int, rank: int) -> dict[str, Any] | None:
        """Return the record of a rank's end, or None."""
        return last_record(self.path, restart, rank, lambda record: record["kind"] == "run_end")


class RunRecord(RunSummary):
    """A run at the time this object was made. Rows are read on request.

    Attributes:
        torn_lines: number of lines that hold no complete record.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._scan = _Scan(self.path)
        self.torn_lines = self._scan.torn_lines

    def groups(self) -> list[str]:
        """Return the names of the metric groups, sorted."""
        return sorted(self._scan.places)

    def count(self, group: str) -> int:
        """Return the number of rows written to a group, superseded and merged ones included."""
        if (places := self._scan.places.get(group)) is None:
            return 0
        return len(places.seq)

    def rows(self, group: str, *, superseded: bool = False, batches: bool = False) -> list[Row]:
        """Return the series of a group: rows by restart and step; see :meth:`iter_rows`."""
        return list(self.iter_rows(group, superseded=superseded, batches=batches))

    def iter_rows(self, group: str, *, superseded: bool = False, batches: bool = False) -> Iterator[Row]:
        """Read the series of a group row by row, without holding it in memory.

        Args:
            group: a metric group; an unknown one has no rows.
            superseded: whether to include rows that a later restart replaced; without them no step occurs twice.
            batches: whether to include batch metrics.
        """
        yield from self._read(group, self._series(group, superseded=superseded), batches=batches)

    def count_and_last(self, group: str) -> tuple[int, Row | None]:
        """Return the number of rows in the series of a group, and the last one; only that one is read."""
        count = 0
        last: list[_RowRef] = []
        for row in self._series(group):
            count += 1
            last = [row]
        return count, next(self._read(group, last), None)

    def records(self, kind: str) -> list[Record]:
        """Return all records of a kind, by restart, then by time."""
        records = [Record(restart, rank, r) for restart, rank, r in self._scan.records if r["kind"] == kind]
        return sorted(records, key=lambda r: (r.restart, r.time, r.rank, r.seq))

    @property
    def status(self) -> str | None:
        """The status that was set last."""
        if (status := self._last("status", "status")) is None:
            return None
        return str(status)

    def settings(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the last settings of that name (``hparams`` or ``config``) that each restart recorded."""
        recorded = [(record.restart, record.get(name)) for record in self.records("settings")]
        return {restart: settings for restart, settings in recorded if isinstance(settings, dict)}

    def last_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of the last restart that recorded any; empty if none did."""
        return next(reversed(self.settings(name).values()), {})

    @property
    def metadata(self) -> dict[str, Any]:
        """The run's metadata, as set last."""
        metadata = self._last("metadata", "metadata")
        if not isinstance(metadata, dict):
            return {}
        return metadata

    @property
    def progress(self) -> float | None:
        """The progress that was reported last."""
        fraction = self._last("progress", "fraction")
        if not isinstance(fraction, (int, float)):
            return None
        return float(fraction)

    def _last(self, kind: str, key: str) -> Any:
        if not (records := self.records(kind)):
            return None
        return records[-1].get(key)

    def _series(self, group: str, *, superseded: bool = False) -> Iterator[_RowRef]:
        places = self._scan.places.get(group)
        if places is not None:
            yield from _series(places, self._restored, superseded=superseded)

    def _read(self, group: str, rows: Iterable[_RowRef], *, batches: bool = False) -> Iterator[Row]:
        """Read the rows at these positions, without those that are damaged meanwhile."""
        from det_core.journal._format import decode

        with closing(_LineReader(self._scan.files)) as lines:
            for indices, superseded in rows:
                at = self._scan.places[group]
                here = ((i, lines.read(at.file[i], at.offset[i], at.size[i])) for i in indices)
                records = [(i, record) for i, line in here if (record := decode(line)) is not None]
                if records:
                    first = records[0][0]
                    yield _merge_rows([r for _, r in records], at.restart[first], at.rank[first], superseded, batches)

    @cached_property
    def _restored(self) -> dict[int, int]:
        """The smallest step of a checkpoint that each restart restored."""
        restored: dict[int, int] = {}
        for r in self.records("restore"):
            step = r.get("steps_completed")
            if isinstance(step, int):
                restored[r.restart] = min(step, restored.get(r.restart, step))
        return restored


def read_run(folder: Path | str) -> RunRecord:
    """Read a run from its directory.

    Raises:
        RunNotFound: If the directory does not exist, or is not that of a run.
    """
    path = Path(folder)
    if not _is_run(path):
        raise RunNotFound(f"no run in {path}")
    return RunRecord(path)


def list_runs(home: Path | str) -> list[RunSummary]:
    """Return the runs of a home directory, newest first, without reading their journals.

    Raises:
        RunError: If it cannot be listed; the message has path and cause.
    """
    return [RunSummary(path) for path in run_paths(Path(home)) if _is_run(path)]


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of every line that is not blank, without its newline."""
    file = open_file(path)
    if file is None:
        return
    at = 0
    with file:
        for line in file:
            if line != b"\n":
                yield at, line.rstrip(b"\n")
            at += len(line)


def next_seq(folder: Path, restart: int, rank: int) -> int:
    """Return the number after the last one that a process has written here; 0 for a new journal."""
    from det_core.journal._format import decode

    files = journal_files(folder).get((restart, rank), [])
    numbers = ((decode(line) or {}).get("seq", -1) for path in files for _, line in lines_of(path))
    return max(numbers, default=-1) + 1


def last_record(
    folder: Path, restart: int, rank: int, matches: Callable[[dict[str, Any]], Any]
) -> dict[str, Any] | None:
    """Return the last record of a process that ``matches`` accepts, or None. Only the ends of its files are read."""
    from det_core.journal._format import decode

    for path in reversed(journal_files(folder).get((restart, rank), [])):
        for line in reversed(_tail(path)):
            record = decode(line)
            if record is not None and record["kind"] != "journal" and matches(record):
                return record
    return None


def records_before(folder: Path, restart: int, rank: int, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a rank of a run from before a restart, newest first, from the ends of its files."""
    from det_core.journal._format import decode

    files = journal_files(folder)
    for earlier in reversed(range(restart)):
        paths = files.get((earlier, rank), [])
        if not paths or not is_of_run(paths, run_id):  # several trials may have written into one directory
            continue
        for path in reversed(paths):
            for line in reversed(_tail(path, SERIES_TAIL_BYTES)):
                record = decode(line)
                if record is not None and record["kind"] != "journal":
                    yield record


def is_of_run(files: Sequence[Path], run_id: str | None) -> bool:
    """Return whether a journal names this run in its header; with ``run_id=None`` every journal does."""
    from det_core.journal._format import parse

    if run_id is None:
        return True
    header = next((record for _, line in lines_of(files[0]) if (record := parse(line))), {})
    return header.get("run_id") == run_id


def _tail(path: Path, size: int = TAIL_BYTES) -> list[bytes]:
    file = open_file(path)
    if file is None:
        return []
    with file:
        file.seek(max(os.fstat(file.fileno()).st_size - size, 0))
        return file.read().split(b"\n")


def _is_run(path: Path) -> bool:
    return (path / INFO_FILE).exists() or bool(journal_files(path))


@dataclass
class _RowIndex:
    """Positions of the rows of one group, as columns."""

    restart: array[int] = field(default_factory=lambda: array("i"))
    rank: array[int] = field(default_factory=lambda: array("i"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    file: array[int] = field(default_factory=lambda: array("i"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))

    def first_steps(self) -> dict[int, int]:
        """Return the first step of each restart: the smallest among its ranks' first rows with a step."""
        first: dict[tuple[int, int], tuple[int, int]] = {}
        for restart, rank, seq, step in zip(self.restart, self.rank, self.seq, self.step, strict=True):
            key = restart, rank
            if step != NO_STEP and (key not in first or seq < first[key][0]):
                first[key] = (seq, step)
        steps: dict[int, int] = {}
        for (restart, _), (_, step) in first.items():
            steps[restart] = min(step, steps.get(restart, step))
        return steps

    def order(self) -> Sequence[int]:
        """Return indices by restart, step (none last), rank and seq."""
        restart, step, rank, seq = self.restart, self.step, self.rank, self.seq
        if seq and restart[0] == restart[-1] and rank[0] == rank[-1] and min(step) != NO_STEP:
            before = iter(step)
            next(before)
            if all(map(lt, step, before)):  # one process, growing steps: sorted as they are
                return range(len(seq))
        return sorted(range(len(seq)), key=lambda i: (restart[i], step[i] == NO_STEP, step[i], rank[i], seq[i]))


class _Scan:
    """Content of the files of a run: rows by position, other records in full. A duplicated record counts once.

    Attributes:
        files: the journal files.
        places: positions of rows by group.
        records: restart, rank and record, in no particular order.
        torn_lines: number of lines that hold no complete record.
    """

    def __init__(self, folder: Path) -> None:
        self.files: list[Path] = []
        self.places: dict[str, _RowIndex] = {}
        self.records: list[tuple[int, int, dict[str, Any]]] = []
        self.torn_lines = 0
        for (restart, rank), paths in journal_files(folder).items():
            # A record may be in two files of a process, but never twice in one.
            seen: set[int] | None = set() if len(paths) > 1 else None
            for path in paths:
                self._read(restart, rank, path, seen)

    def _read(self, restart: int, rank: int, path: Path, seen: set[int] | None) -> None:
        from det_core.journal._format import decode

        number = len(self.files)
        self.files.append(path)
        for offset, line in lines_of(path):
            record = decode(line)
            if record is None:
                self.torn_lines += 1
                continue
            if record["kind"] == "journal":
                continue
            seq = record["seq"]
            if seen is not None:
                if seq in seen:
                    continue
                seen.add(seq)
            if record["kind"] != "metrics":
                self.records.append((restart, rank, record))
                continue
            places = self.places.get(record["group"])
            if places is None:
                places = self.places[record["group"]] = _RowIndex()
            step = record["steps_completed"]
            places.restart.append(restart)
            places.rank.append(rank)
            places.seq.append(seq)
            places.step.append(NO_STEP if step is None else step)
            places.file.append(number)
            places.offset.append(offset)
            places.size.append(len(line))


class _LineReader:
    """Random access to lines of several files, of which one is open at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        # One at a time: a run may have more ranks than a process may open files.
        self._open = -1
        self._fd = -1

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return ``size`` bytes at an offset of the file with that index."""
        if number != self._open:
            self.close()
            self._fd = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
            self._open = number
        return os.pread(self._fd, size, offset)

    def close(self) -> None:
        """Close the open file, if there is one."""
        if self._fd >= 0:
            os.close(self._fd)
        self._open = -1
        self._fd = -1


_RowRef = tuple[list[int], bool]
"""Indices of the rows that are merged into one of a series, and whether that one is superseded."""


def _series(places: _RowIndex, restored: Mapping[int, int], *, superseded: bool) -> Iterator[_RowRef]:
    """Yield the rows of a group by restart and step, without reading them.

    Rows without a step come last in their restart.
    """
    first = places.first_steps()
    limits = _superseded_from(first, restored)
    # Steps below that of a restart's first row, which a script may report late: they replace earlier ones, too.
    late: dict[int, set[int]] = {}
    for restart, step in zip(places.restart, places.step, strict=True):
        if step != NO_STEP and step < first[restart]:
            late.setdefault(restart, set()).add(step)
    for (restart, step), same_step in groupby(places.order(), key=lambda i: (places.restart[i], places.step[i])):
        if step == NO_STEP:
            yield from (([index], False) for index in same_step)
            continue
        is_old = step >= limits[restart] or any(r > restart and step in reported for r, reported in late.items())
        if superseded or not is_old:
            yield list(same_step), is_old


def _superseded_from(first: Mapping[int, int], restored: Mapping[int, int]) -> dict[int, float]:
    """Return the step from which each restart's rows of a group are superseded; infinite if none are.

    A run that is killed at step 80 and resumed from a checkpoint of step 50 reports steps 51 to 80 again. In each group
    a row is superseded by a later restart that reported the same step, or whose first row in that group has the same or
    a smaller step, or that restored a checkpoint of a smaller step. Rows without a step never are. So a series has no
    step twice, and superseded rows stay in the record.

    Args:
        first: step of the first row with a step in that group, by restart.
        restored: smallest step of a checkpoint that was restored, by restart.
    """
    limit = float("inf")
    limits: dict[int, float] = {}
    for restart in sorted({*first, *restored}, reverse=True):
        limits[restart] = limit
        limit = min(limit, first.get(restart, limit), restored.get(restart, limit) + 1)
    return limits


def _merge_rows(records: list[dict[str, Any]], restart: int, rank: int, superseded: bool, batches: bool) -> Row:
    """Return one row for the rows of one restart and step.

    If ranks differ the lowest one's value counts, and of several values of a rank the first.
    """
    record = records[0]
    metrics: dict[str, Any] = record["metrics"]
    batch_metrics = record.get("batch_metrics")
    conflicts: list[str] = []
    for other in records[1:]:
        for key, value in other["metrics"].items():
            if key not in metrics:
                metrics[key] = value
            elif not equal_json(metrics[key], value) and key not in conflicts:
                conflicts.append(key)
        if batch_metrics is None:
            batch_metrics = other.get("batch_metrics")
    return Row(
        group=record["group"],
        steps_completed=record["steps_completed"],
        metrics=metrics,
        time=record["time"],
        restart=restart,
        rank=rank,
        seq=record["seq"],
        superseded=superseded,
        conflicts=tuple(conflicts),
        batch_metrics=batch_metrics if batches else None,
    )
