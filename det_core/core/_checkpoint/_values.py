"""What metrics a checkpoint has: those of its step in the run's journals, else those in its own metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from det_core._errors import CheckpointCorrupt, CheckpointNotFound, RunNotFound
from det_core.journal import Row, RunRecord, read_run
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
        self._folder = folder
        self._metadata: dict[str, Mapping[str, Any]] = {}

    def candidates(self, headers: Sequence[Header], names: Collection[str]) -> list[Candidate]:
        """The checkpoints as policies see them, with the metrics ``names``.

        Raises:
            StorageError: the store refused.
        """
        validations = self._validations() if names else None
        found = []
        for h in headers:
            metrics = {}
            for name in names:
                row = None if validations is None else validations.of(h)
                value = None if row is None else number_in(row.metrics, name)
                value = number_in(self._metadata_of(h), name) if value is None else value
                if value is not None:
                    metrics[name] = value
            found.append(
                Candidate(h.storage_id, h.steps_completed, seconds(h), h.restart, h.ordinal, metrics, h.run_id)
            )
        return found

    def _validations(self) -> Validations | None:
        try:
            return None if self._folder is None else Validations(read_run(self._folder))
        except RunNotFound:
            return None

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
    """The validation rows of a run, by checkpoint.

    Args:
        run: the run's record.
    """

    def __init__(self, run: RunRecord) -> None:
        self._rows: dict[int, Row] = {}
        self._began: dict[int, int] = {}
        for row in run.iter_rows(GROUP, superseded=True):
            if row.steps_completed is not None:
                self._note(row.restart, row.steps_completed)
                if not row.superseded:
                    self._rows[row.steps_completed] = row
        for record in run.records("restore"):
            if isinstance(step := record.get("steps_completed"), int):
                self._note(record.restart, step)

    def of(self, header: Header) -> Row | None:
        """The row about a checkpoint: the latest of its step that counts.

        None if a later restart began below that step: that row is about the weights of the later restart.
        """
        if any(r > header.restart and began < header.steps_completed for r, began in self._began.items()):
            return None
        return self._rows.get(header.steps_completed)

    def _note(self, restart: int, step: int) -> None:
        self._began[restart] = min(step, self._began.get(restart, step))


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
