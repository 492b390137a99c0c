"""Which store is meant: one that is named, or the one that a run wrote to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.client._find import LATEST, find, home_of
from det_core.client._run import Run
from det_core.errors import CheckpointError, RunNotFound
from det_core.storage import Store, open_store

Storage = str | os.PathLike[str] | Mapping[str, Any]
"""As ``core.init(checkpoint_storage=)`` takes it; also the JSON of a mapping."""


def chosen_store(storage: Storage | None, run: str | None, home: Path | str | None) -> tuple[Store, str | None]:
    """The store, and the run that is meant; None: every run in it.

    Args:
        storage: the store; None: the one that the run wrote to last.
        run: a run, as :func:`~det_core.client.run` takes it, also one that is only known to the store. None: every
            run in ``storage``; without that the newest run here.
        home: where runs are kept.

    Raises:
        ValueError: ``storage`` names no store.
        RunNotFound: there is no such run.
        CheckpointError: what the run recorded opens no store here.
    """
    where = home_of(home)
    if storage is not None:
        store = open_store(_parsed(storage), default=where)
        return store, None if run is None else _run_of(store, run, home)
    found = Run(find(run or LATEST, home))
    recorded = found.storage
    try:
        return open_store(recorded, default=found.path / "checkpoints"), found.run_id
    except ValueError as e:
        raise CheckpointError(
            f"run {found.run_id} kept its checkpoints in {recorded}, which cannot be opened ({e}): name the storage"
        ) from e


def run_folder(run_id: str, home: Path | str | None) -> Path | None:
    """The folder of a run, if it is kept here."""
    try:
        found = find(run_id, home)
    except RunNotFound:
        return None
    return found.path if found.run_id == run_id else None


def _run_of(store: Store, run: str, home: Path | str | None) -> str:
    """The id of a run that is kept here, or that the store has checkpoints of."""
    try:
        return find(run, home).run_id
    except RunNotFound as e:
        known = sorted({header.run_id for header in store.list()})
        found = [r for r in known if r == run] or [r for r in known if run and r.startswith(run)]
        if run == LATEST:
            found = known[-1:]
        if len(found) != 1:
            there = f"it has checkpoints of {', '.join(known[-5:])}" if known else "it has no checkpoints"
            raise RunNotFound(f"{e}; nor has {store.root} any of one run of that name: {there}") from e
        return found[0]


def _parsed(storage: Storage) -> Any:
    """The mapping, where its JSON is given."""
    if not isinstance(storage, str) or not storage.lstrip().startswith("{"):
        return storage
    try:
        return json.loads(storage)
    except ValueError as e:
        raise ValueError(f"the storage {storage!r} begins like JSON, but is none: {e}") from e
