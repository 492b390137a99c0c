"""Reading runs back from Python.

Example::

    from det_core import client

    run = client.run("latest")
    print(run.state, run.metrics("validation"))
"""

from __future__ import annotations

from pathlib import Path

from det_core.client._delete import delete_run
from det_core.client._find import find, home_of
from det_core.client._run import Run
from det_core.journal import list_runs

__all__ = ["Run", "delete_run", "run", "runs"]


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
