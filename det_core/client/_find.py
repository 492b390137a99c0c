"""Naming a run as people do: by its id, by the start of its id, or as ``latest``."""

from __future__ import annotations

from pathlib import Path

from det_core._env import Environment
from det_core.errors import RunNotFound
from det_core.journal import RunSummary, list_runs, match_run_id

LATEST = "latest"


def home_of(home: Path | str | None) -> Path:
    """The home folder to look in; None: the one of the environment."""
    return Environment.read().home if home is None else Path(home).expanduser().absolute()


def find(run: str, home: Path | str | None = None) -> RunSummary:
    """The run that ``run`` names.

    Args:
        run: an id, a prefix that only one id has, or ``latest`` (of any name).
        home: where runs are kept; None: as the environment says.

    Raises:
        RunNotFound: no run has that name, or several begin with it.
    """
    where = home_of(home)
    runs = list_runs(where)
    if not runs:
        raise RunNotFound(f"there are no runs in {where / 'runs'}")
    if run == LATEST:
        return runs[0]
    by_id = {summary.run_id: summary for summary in runs}
    return by_id[match_run_id(run, by_id, where / "runs")]
