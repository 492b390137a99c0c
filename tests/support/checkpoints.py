"""Checkpoint contexts for tests, and checks of the files that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from det_core import core
from det_core.core._checkpoint import CheckpointContext, CheckpointObserver, StartCheckpoint
from det_core.storage import DirectoryStore, Disk, Owner, Progress, Store

FILES = {"model.pt": b"m" * 300_000, "sub/optimizer.pt": b"o" * 1000, "sub/deep/empty": b"", "rng": b"r"}
STEPS = {"steps_completed": 3}
RUN = "run"


class Recorder(CheckpointObserver):
    """Recorder of a context's checkpoint events."""

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.gone: list[tuple[str, dict[str, int]]] = []
        self.restores: list[tuple[str, int | None]] = []
        self.said: list[str] = []

    def context(
        self,
        distributed: core.DistributedContext,
        root: Path,
        *,
        restart: int = 0,
        disk: Disk | None = None,
        progress: Progress | None = None,
        patience: float = 1.0,
        store: Store | None = None,
        start: StartCheckpoint | None = None,
        deadline: Callable[[], float | None] = lambda: None,
    ) -> CheckpointContext:
        """Return a context on a directory (or on ``store``) that notifies this recorder."""
        return CheckpointContext(
            distributed,
            store or DirectoryStore(root, disk=disk, visibility_timeout=patience),
            run_id=RUN,
            restart=restart,
            observer=self,
            start=start,
            scratch=root.parent / "scratch",
            progress=progress,
            deadline=deadline,
            say=self.said.append,
        )

    def on_committed(self, checkpoint: Any) -> None:
        self.registered.append(checkpoint)

    def on_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        self.gone.append((storage_id, dict(remaining)))

    def on_restored(self, storage_id: str, steps_completed: int | None, written_by: str | None) -> None:
        self.restores.append((storage_id, steps_completed))


def alone() -> core.DistributedContext:
    """Return the distributed context of a job of one rank."""
    return core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


def fill(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    """Write files into a folder, which is made."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files below a directory, but for the manifest."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".det_core/")}


def listed(root: Path) -> list[str]:
    """Return the listed checkpoints; each is read and compared with its manifest, byte for byte."""
    store = DirectoryStore(root)
    found = [header.storage_id for header in store.list()]
    for storage_id in found:
        checkpoint = store.open(storage_id)
        checkpoint.check(checkpoint.manifest.files)
        assert set(tree(root / storage_id)) == set(checkpoint.manifest.files)
        assert checkpoint.metadata()["steps_completed"] >= 0
    return found


def nothing_is_left_over(root: Path, restart: int = 1) -> None:
    """Check that the collection of a later restart leaves nothing beside the listed checkpoints."""
    store = DirectoryStore(root)
    store.collect(Owner.current(RUN, restart))
    aside = root / ".det_core-tmp"
    assert not aside.exists() or list(aside.iterdir()) == []
    names = {path.name for path in root.iterdir() if path.name != aside.name} if root.exists() else set()
    assert names == set(listed(root))
