"""Naming a run as people do: by its id, by the start of its id, or as ``latest``."""

from __future__ import annotations

from pathlib import Path

from det_core._env import Environment
from det_core.errors import RunNotFound
from det_core.journal import RunSummary, list_runs

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
    found = [r for r in runs if r.run_id == run] or [r for r in runs if run and r.run_id.startswith(run)]
    if not found:
        raise RunNotFound(f"no run {run!r} in {where / 'runs'}; `det-core runs list` shows those there are")
    if len(found) > 1:
        some = ", ".join(r.run_id for r in found[:5]) + (", …" if len(found) > 5 else "")
        raise RunNotFound(f"{len(found)} runs begin with {run!r}: {some}; give more of the id")
    return found[0]
