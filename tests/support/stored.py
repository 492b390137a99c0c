"""Runs with checkpoints, for tests of what reads them: written as a training run writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.journal import Journal, RunFolder
from det_core.storage import DirectoryStore, Disk, Header, Owner, Store, scan

FILES = {"model.pt": b"m" * 70_000, "sub/optimizer.pt": b"o" * 1000, "empty": b""}


def put(
    store: Store,
    storage_id: str,
    steps: int,
    scratch: Path,
    *,
    run_id: str = "run",
    restart: int = 0,
    ordinal: int = 1,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] = FILES,
    age: float = 0.0,
) -> None:
    """Write one checkpoint, committed ``age`` seconds ago."""
    source = scratch / f"source-of-{storage_id}"
    for path, data in files.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    staging = store.begin(storage_id, Owner.current(run_id, restart))
    listing = scan(Disk(str(source)), str(source))
    header = Header(run_id, restart, ordinal, _clock.iso(_clock.now() - age), steps, storage_id)
    staging.commit(staging.put(listing), listing.directories, {"steps_completed": steps, **(metadata or {})}, header)


def run_with_checkpoints(
    home: Path,
    scratch: Path,
    steps: Sequence[int] = (10, 20, 30),
    *,
    storage: Path | None = None,
    losses: Sequence[float] = (),
    name: str = "job",
) -> tuple[str, Store]:
    """Write a run with checkpoints ``c<steps>-<run>`` and a validation loss for each; return its ID and store."""
    folder = RunFolder.create(home, name=name)
    folder.begin_restart({"argv": ["python", "train.py"]})
    store = DirectoryStore(storage or folder.path / "checkpoints")
    journal = Journal(folder.path, run_id=folder.run_id, restart=0, rank=0)
    journal.record("run_start", {"size": 1, "host": "h", "pid": 1, "storage": str(storage) if storage else None})
    for ordinal, step in enumerate(steps, 1):
        storage_id = f"c{step}-{folder.run_id[-6:]}"
        if ordinal <= len(losses):
            journal.metrics("validation", step, {"loss": losses[ordinal - 1], "acc": {"top1": step}})
        put(store, storage_id, step, scratch, run_id=folder.run_id, ordinal=ordinal)
        journal.record("checkpoint", {"storage_id": storage_id, "metadata": {"steps_completed": step}})
    journal.record("run_end", {"outcome": "completed"})
    journal.close()
    folder.release()
    return folder.run_id, store
