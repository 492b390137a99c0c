"""Fetching a checkpoint of an experiment from where its trials have put it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.client._checkpoints import Checkpoint, Checkpoints
from det_core.errors import CheckpointError, CheckpointNotFound
from det_core.journal import ambiguous_id, match_id
from det_core.storage import open_store

if TYPE_CHECKING:
    from det_core.client._experiment import Experiment


def fetch(experiment: Experiment, storage_id: str | None, folder: Path) -> Path:
    """Download a checkpoint; see :meth:`Experiment.download_checkpoint`."""
    with opened(experiment, storage_id) as checkpoint:
        checkpoint.download(folder)
    return folder


@contextmanager
def opened(experiment: Experiment, storage_id: str | None) -> Iterator[Checkpoint]:
    """One of the experiment's checkpoints in its storage: by its id or the beginning of it, or None for the best.

    Raises:
        CheckpointNotFound: there is none, or several begin with that.
        CheckpointError: the storage cannot be opened here.
    """
    record = _chosen(experiment, storage_id)
    settings = record.get("storage") or experiment.config.get("checkpoint_storage")
    if not settings:
        raise CheckpointError(f"experiment {experiment.id} names no checkpoint_storage")
    try:
        store = open_store(settings, default=Path())
    except ValueError as e:
        raise CheckpointError(f"the checkpoints of experiment {experiment.id} cannot be reached from here: {e}") from e
    with Checkpoints(store, None, None) as checkpoints:
        yield checkpoints[str(record["uuid"])]


def _chosen(experiment: Experiment, storage_id: str | None) -> dict[str, Any]:
    if storage_id is None:
        best = experiment.best_checkpoint()
        if best is None:
            raise CheckpointNotFound(f"experiment {experiment.id} has no checkpoint")
        return best
    known = {str(c["uuid"]): c for c in experiment.checkpoints() if c["state"] != "DELETED"}
    found = match_id(storage_id, known)
    if not found:
        raise CheckpointNotFound(f"experiment {experiment.id} has no checkpoint {storage_id!r}")
    if len(found) > 1:
        raise CheckpointNotFound(ambiguous_id(storage_id, found, f"checkpoints of experiment {experiment.id}"))
    return known[found[0]]
