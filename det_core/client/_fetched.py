"""Fetching a checkpoint of an experiment from where its trials have put it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from det_core._errors import CheckpointError, CheckpointNotFound
from det_core.client._checkpoint import Checkpoint
from det_core.client._checkpoints import Checkpoints
from det_core.storage import open_store

if TYPE_CHECKING:
    from det_core.client._experiment import Experiment


def fetch(experiment: Experiment, storage_id: str | None, folder: Path) -> Path:
    """Download a checkpoint; see :meth:`Experiment.download_checkpoint`."""
    with opened(experiment) as checkpoints:
        chosen(experiment, checkpoints, storage_id).download(folder)
    return folder


def opened(experiment: Experiment) -> Checkpoints:
    """The store that the experiment's configuration names, as seen from here.

    Raises:
        CheckpointError: it cannot be opened here.
    """
    settings = experiment.config.get("checkpoint_storage")
    if not settings:
        raise CheckpointError(f"experiment {experiment.id} names no checkpoint_storage")
    try:
        return Checkpoints(open_store(settings, default=Path()), None, None)
    except ValueError as e:
        raise CheckpointError(f"the checkpoints of experiment {experiment.id} cannot be reached from here: {e}") from e


def chosen(experiment: Experiment, checkpoints: Checkpoints, storage_id: str | None) -> Checkpoint:
    """One of the experiment's checkpoints: by its id or the beginning of it, or None for the best.

    Raises:
        CheckpointNotFound: there is none, or several begin with that.
    """
    if storage_id is None:
        best = experiment.best_checkpoint()
        if best is None:
            raise CheckpointNotFound(f"experiment {experiment.id} has no checkpoint")
        return checkpoints[str(best["uuid"])]
    known = [str(c["uuid"]) for c in experiment.checkpoints() if c["state"] != "DELETED"]
    found = [i for i in known if i == storage_id] or [i for i in known if storage_id and i.startswith(storage_id)]
    if len(found) != 1:
        what = f"{len(found)} checkpoints of experiment {experiment.id} begin with {storage_id!r}: give more of the id"
        raise CheckpointNotFound(what if found else f"experiment {experiment.id} has no checkpoint {storage_id!r}")
    return checkpoints[found[0]]
