"""Removing a run and all that it kept in its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from det_core.client._find import find
from det_core.errors import RunError
from det_core.journal import hold


def delete_run(run_id: str, home: Path | str | None = None) -> Path:
    """Delete a run's folder: its journal, its TensorBoard files and the checkpoints in it.

    Args:
        run_id: an id, the beginning of one, or ``"latest"``.
        home: as for :func:`det_core.client.runs`.

    Returns:
        The folder that was deleted.

    Raises:
        RunNotFound: no run has that name, or several begin with it.
        RunLocked: a process is writing the run.
        RunError: the folder could not be deleted; the message gives the reason.
    """
    run = find(run_id, home)
    try:
        with hold(run.path):
            shutil.rmtree(run.path)
    except OSError as e:
        raise RunError(f"run {run.run_id} could not be deleted: {e}") from e
    return run.path
