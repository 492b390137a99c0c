"""Trials that go on while their master does not run."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from det_core.cli._say import note


def living_trials(home: Path) -> dict[int, int]:
    """Which trials of a home folder's master have a supervisor that lives: trial -> experiment."""
    return {
        int(spec["trial_id"]): int(spec["experiment_id"])
        for folder in (home / "master" / "allocations").glob("*/")
        if _is_live(folder) and (spec := _spec(folder))
    }


def tell_living_trials(home: Path) -> None:
    """Say which trials go on without a master, and how to end them."""
    found = living_trials(home)
    if not found:
        return
    trials = ", ".join(map(str, sorted(found)[:10])) + (", …" if len(found) > 10 else "")
    experiments = sorted(set(found.values()))
    numbers = " ".join(map(str, experiments))
    note(f"trials go on without it (trial {trials} of experiment {', '.join(map(str, experiments))})")
    note(f"to end them: det-core experiment kill {numbers} --home {home} (this starts the master, which finds them)")


def _is_live(folder: Path) -> bool:
    """Whether a supervisor holds the lock of an allocation's folder."""
    try:
        with open(folder / "lock", "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _spec(folder: Path) -> dict[str, Any]:
    try:
        spec = json.loads((folder / "spec.json").read_text())
    except (OSError, ValueError):
        return {}
    return spec if isinstance(spec, dict) and {"trial_id", "experiment_id"} <= spec.keys() else {}
