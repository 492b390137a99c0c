"""Removing a run and all that belongs to it, wherever it was kept."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from det_core.client._checkpoints import Checkpoints
from det_core.client._find import find
from det_core.client._run import Run
from det_core.errors import CheckpointError, DetCoreError, RunError
from det_core.journal import lock_run
from det_core.storage import Owner, Store, event_files_of_run, open_store


def delete_run(run_id: str, home: Path | str | None = None, *, folder_only: bool = False) -> Path:
    """Delete a run: its folder, and its checkpoints and TensorBoard files in the storages that it was given.

    Of a trial of an experiment the folder alone is deleted: what is in storages belongs to the experiment.

    Args:
        run_id: an id, the beginning of one, or ``"latest"``.
        home: as for :func:`det_core.client.runs`.
        folder_only: leave what lies in the storages that it was given (:attr:`Run.storages`).

    Returns:
        The folder that was deleted.

    Raises:
        RunNotFound: no run has that name, or several begin with it.
        RunLocked: a process is writing the run.
        RunError: it could not be deleted; the message gives the reason. Calling this again goes on with the rest.
    """
    run = Run(find(run_id, home))
    with lock_run(run.path), ExitStack() as stack:
        if not folder_only:
            stores = [stack.enter_context(closing(_open(run, storage))) for storage in run.storages]
            for store in stores:
                _refuse_if_read(run, store)
            for store in stores:
                _delete_from(run, store, home)
        try:
            shutil.rmtree(run.path)
        except OSError as e:
            raise RunError(f"run {run.run_id} could not be deleted: {e}") from e
    return run.path


def _open(run: Run, storage: Any) -> Store:
    try:
        return open_store(storage, default=run.path)
    except (ValueError, DetCoreError) as e:
        raise _failure(run, f"its storage {storage} cannot be opened: {e}") from e


def _refuse_if_read(run: Run, store: Store) -> None:
    try:
        used = sorted(store.in_use() & {header.storage_id for header in store.list(run.run_id)})
    except CheckpointError as e:
        raise _failure(run, str(e)) from e
    if used:
        raise RunError(f"run {run.run_id} was not deleted: a process is reading its checkpoint {', '.join(used)}")


def _delete_from(run: Run, store: Store, home: Path | str | None) -> None:
    """Delete the run's checkpoints, damaged ones too, its event files, and what it left unfinished."""
    try:
        storage_ids = [header.storage_id for header in store.list(run.run_id)]
        storage_ids += Checkpoints(store, run.run_id, home).damaged()
        for storage_id in storage_ids:
            store.delete(storage_id)
        store.remove_folder(event_files_of_run(run.run_id))
        store.collect(Owner.current(run.run_id, run.restarts + 1))
    except CheckpointError as e:
        raise _failure(run, str(e)) from e


def _failure(run: Run, cause: str) -> RunError:
    return RunError(
        f"run {run.run_id} could not be deleted: {cause}; to delete its folder alone: "
        f"det-core runs rm {run.run_id} --folder-only"
    )
