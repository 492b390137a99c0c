"""Runs of this machine: the functions that ``det_core.client`` offers."""

from __future__ import annotations

from pathlib import Path

from det_core.client._checkpoints import Checkpoints
from det_core.client._find import find, home_of
from det_core.client._run import Run
from det_core.client._storage import Storage, chosen_store
from det_core.journal import list_runs


def runs(home: Path | str | None = None) -> list[Run]:
    """All runs, newest first.

    Args:
        home: where runs are kept; None: ``DET_CORE_HOME``, else the platform's user data folder.
    """
    return [Run(summary) for summary in list_runs(home_of(home))]


def run(run_id: str, home: Path | str | None = None) -> Run:
    """One run.

    Args:
        run_id: an id, the beginning of one, or ``"latest"``.
        home: as for :func:`runs`.

    Raises:
        RunNotFound: no run has that name, or several begin with it.
    """
    return Run(find(run_id, home))


def checkpoints(storage: Storage | None = None, run: str | None = None, home: Path | str | None = None) -> Checkpoints:
    """The checkpoints of a store.

    Args:
        storage: as ``core.init(checkpoint_storage=)`` takes it, or the JSON of a mapping. None: the store that the
            run wrote to.
        run: an id, the beginning of one, or ``"latest"``: only that run's. None: of every run in ``storage``, or,
            without ``storage``, of the newest run here.
        home: as for :func:`runs`.

    Raises:
        ValueError: ``storage`` names no store.
        RunNotFound: no run has that name, or several begin with it.
        CheckpointError: the store that the run wrote to cannot be opened here.
    """
    return Checkpoints(*chosen_store(storage, run, home), home)
