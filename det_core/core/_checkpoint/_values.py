"""What metrics a checkpoint has: those of its step in the run's journals, else those in its own metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from det_core.errors import CheckpointCorrupt, CheckpointNotFound
from det_core.journal import Cursor, cursors
from det_core.storage import Candidate, Header, Store

GROUP = "validation"


class Values:
    """Looks up the metrics that a retention policy decides by.

    Args:
        store: where the checkpoints lie.
        folder: the run's folder; None: there are no journals to look in.
    """

    def __init__(self, store: Store, folder: Path | None) -> None:
        self._store = store
        self._validations = None if folder is None else Validations(folder)
        self._metadata: dict[str, Mapping[str, Any]] = {}

    def candidates(self, headers: Sequence[Header], names: Collection[str]) -> list[Candidate]:
        """The checkpoints as policies see them, with the metrics ``names``.

        Raises:
            StorageError: the store refused.
        """
        if names and self._validations is not None:
            self._validations.refresh()
        return [
            Candidate(
                h.storage_id, h.steps_completed, seconds(h), h.restart, h.ordinal, self._numbers(h, names), h.run_id
            )
            for h in headers
        ]

    def _numbers(self, header: Header, names: Collection[str]) -> dict[str, float]:
        reported = self._validations.of(header) if names and self._validations is not None else {}
        numbers = {}
        for name in names:
            value = number_in(reported, name)
            value = number_in(self._metadata_of(header), name) if value is None else value
            if value is not None:
                numbers[name] = value
        return numbers

    def _metadata_of(self, header: Header) -> Mapping[str, Any]:
        known = self._metadata.get(header.storage_id)
        if known is None:
            try:
                known = self._store.open(header.storage_id).metadata()
            except (CheckpointNotFound, CheckpointCorrupt):
                known = {}
            self._metadata[header.storage_id] = known
        return known


class Validations:
    """The validation metrics of a run, by checkpoint. What is new in the journals is read at each :meth:`refresh`.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._rows: dict[int, dict[tuple[int, int, int], Mapping[str, Any]]] = {}
        self._began: dict[int, int] = {}

    def refresh(self) -> None:
        """Take in what was reported since the last time."""
        for found in cursors(self._folder, name="unsaved"):
            cursor = self._cursors.setdefault((found.restart, found.rank), found)
            while lines := cursor.read():
                cursor.mark(lines)
                for line in lines:
                    if line.record["kind"] == "restore" or line.record.get("group") == GROUP:
                        self._take(cursor.restart, cursor.rank, line.decoded())

    def _take(self, restart: int, rank: int, record: Mapping[str, Any]) -> None:
        restored = record["kind"] == "restore"
        step = record["body"].get("steps_completed") if restored else record["steps_completed"]
        if not isinstance(step, int):
            return
        self._began[restart] = min(step, self._began.get(restart, step))
        if not restored:
            self._rows.setdefault(step, {})[restart, rank, record["seq"]] = record["metrics"]

    def of(self, header: Header) -> dict[str, Any]:
        """The metrics of a checkpoint: those of its step that count; of the ranks that differ the lowest rank's.

        None, if a restart since then began below that step: what it reported is about other weights.
        """
        step = header.steps_completed
        rows = self._rows.get(step, {})
        restart = max((key[0] for key in rows), default=-1)
        if any(r > min(restart, header.restart) and began < step for r, began in self._began.items()):
            return {}
        metrics: dict[str, Any] = {}
        for key in sorted(rows, reverse=True):
            metrics |= rows[key] if key[0] == restart else {}
        return metrics


def number_in(metrics: Mapping[str, Any], name: str) -> float | None:
    """The number called ``name``, where ``a.b`` may also be ``b`` within ``a``; None if there is none."""
    for path in _paths(name):
        value: Any = metrics
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _paths(name: str) -> Iterable[list[str]]:
    yield [name]
    for i, c in enumerate(name):
        if c == ".":
            yield from ([name[:i], *rest] for rest in _paths(name[i + 1 :]))


def seconds(header: Header) -> float:
    """When a checkpoint was committed, in seconds since the epoch; infinite where that cannot be read."""
    try:
        return datetime.fromisoformat(header.time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("inf")
