"""Checkpoints of one rank: files on disk, records, and remains of a dead writer."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointError
from det_core.storage import DirectoryStore, Disk, Owner
from support import TESTS
from support.checkpoints import FILES, RUN, STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.ranks import running

METADATA_JSON = b'{\n  "steps_completed": 3\n}'


def test_the_layout_of_a_checkpoint(tmp_path: Path) -> None:
    recorder = Recorder()
    source = fill(tmp_path / "source")
    (source / "nothing").mkdir()
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store", restart=2)
        storage_id = context.upload(source, STEPS)
    stored = tmp_path / "store" / storage_id
    assert tree(stored) == {**FILES, "metadata.json": METADATA_JSON}
    assert (stored / "nothing").is_dir()
    manifest = json.loads((stored / ".det_core" / "manifest.json").read_bytes())
    assert {k: manifest[k] for k in ("version", "run_id", "restart", "ordinal", "steps_completed", "storage_id")} == {
        "version": 1, "run_id": RUN, "restart": 2, "ordinal": 1, "steps_completed": 3, "storage_id": storage_id,
    }  # fmt: skip
    assert manifest["directories"] == ["nothing/", "sub/", "sub/deep/"]
    entry = next(f for f in manifest["files"] if f["path"] == "rng")
    assert entry == {"path": "rng", "size": 1, "algorithm": "xxh3_128", "digests": [digest(b"r")]}
    (record,) = recorder.registered
    assert record == {
        "storage_id": storage_id,
        "steps_completed": 3,
        "metadata": STEPS,
        "resources": {
            **{path: len(data) for path, data in FILES.items()},
            "metadata.json": len(METADATA_JSON),
            "nothing/": 0,
            "sub/": 0,
            "sub/deep/": 0,
        },
        "run_id": RUN,
        "restart": 2,
        "ordinal": 1,
        "time": manifest["time"],
    }
    assert tree(source) == FILES


def digest(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def test_permissions_are_kept_but_for_writing(context: CheckpointContext, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    (source / "rng").chmod(0o755)
    (source / "model.pt").chmod(0o400)
    storage_id = context.upload(source, STEPS)
    context.download(storage_id, tmp_path / "out")
    for folder, run, read in ((tmp_path / "store" / storage_id, 0o555, 0o400), (tmp_path / "out", 0o755, 0o600)):
        assert (folder / "rng").stat().st_mode & 0o777 == run
        assert (folder / "model.pt").stat().st_mode & 0o777 == read, "read-only where stored, writable where fetched"


def test_checkpoints_are_numbered_in_their_restart(tmp_path: Path) -> None:
    store, expected = DirectoryStore(tmp_path / "store"), []
    for restart in (0, 1, 10):
        with alone() as distributed:
            recorder = Recorder()
            context = recorder.context(distributed, tmp_path / "store", restart=restart)
            for _ in range(2):
                expected.append(context.upload(fill(tmp_path / "source"), STEPS))
                assert store.list(RUN)[-1].storage_id == expected[-1]
            assert [record["ordinal"] for record in recorder.registered] == [1, 2]
    assert [header.storage_id for header in store.list(RUN)] == expected
    store.delete(expected[-1])
    assert store.list(RUN)[-1].storage_id == expected[-2]


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store")
        for error in (ArithmeticError, KeyboardInterrupt, SystemExit):
            with pytest.raises(error), context.store_path(STEPS) as (path, storage_id):
                fill(path)
                assert storage_id
                raise error
        assert list((tmp_path / "store" / ".det_core-tmp").iterdir()) == []
    assert recorder.registered == []
    assert listed(tmp_path / "store") == []


def test_nothing_is_listed_while_the_block_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store")
        with context.store_path(STEPS) as (path, storage_id):
            fill(path)
            assert listed(tmp_path / "store") == []
            assert not (tmp_path / "store" / storage_id).exists()
            assert recorder.registered == []
        assert listed(tmp_path / "store") == [storage_id]
        assert len(recorder.registered) == 1


def test_an_empty_checkpoint_is_one(context: CheckpointContext, tmp_path: Path) -> None:
    with context.store_path(STEPS) as (_, storage_id):
        pass
    with context.restore_path(storage_id) as path:
        assert tree(path) == {"metadata.json": METADATA_JSON}


def test_a_folder_that_the_script_removed_is_an_error(context: CheckpointContext, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was removed"), context.store_path(STEPS) as (path, _):
        path.rmdir()
    nothing_is_left_over(tmp_path / "store", restart=0)


class TestHandle:
    """``checkpoint.begin()``."""

    def test_commit_in_another_function(self, tmp_path: Path) -> None:
        recorder = Recorder()
        with alone() as distributed:
            handle = recorder.context(distributed, tmp_path / "store").begin(STEPS)
            fill(handle.path)
            handle.commit()
            with pytest.raises(RuntimeError, match="committed or aborted before"):
                handle.commit()
            handle.abort()
        assert listed(tmp_path / "store") == [handle.storage_id]
        assert [record["storage_id"] for record in recorder.registered] == [handle.storage_id]

    def test_abort(self, tmp_path: Path) -> None:
        recorder = Recorder()
        with alone() as distributed:
            handle = recorder.context(distributed, tmp_path / "store").begin(STEPS)
            fill(handle.path)
            handle.abort()
            handle.abort()
            assert not handle.path.exists()
            with pytest.raises(RuntimeError, match="committed or aborted before"):
                handle.commit()
        assert recorder.registered == []
        assert listed(tmp_path / "store") == []

    def test_close_removes_what_was_not_committed(
        self, context: CheckpointContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = context.begin(STEPS)
        context.close()
        assert not handle.path.exists()
        with pytest.raises(RuntimeError):
            handle.commit()
        assert handle.storage_id in caplog.text


WRITER = """
import sys, itertools
from pathlib import Path
from typing import Any
from support.checkpoints import Recorder, alone, fill
root, restart = Path(sys.argv[1]), int(sys.argv[2])
with alone() as distributed:
    context = Recorder().context(distributed, root, restart=restart)
    print("ready", flush=True)
    for step in itertools.count():
        files = {f"f{i}": b"%d %d" % (step, i) * 5000 for i in range(20)}
        if step % 2:
            context.upload(fill(root.parent / "source", files), {"steps_completed": step})
        else:
            with context.store_path({"steps_completed": step}) as (path, storage_id):
                fill(path, files)
        if step % 3 == 2:
            context.delete(context._store.list()[0].storage_id)
"""


def killed_writers(folder: Path, times: int, seed: int) -> None:
    """Kill a process that stores and deletes, again and again; what is listed is whole each time."""
    chance = random.Random(seed)
    root = folder / "store"
    for restart in range(times):
        with running(WRITER, 1, folder, env={"PYTHONPATH": str(TESTS)}, args=(str(root), str(restart))) as writer:
            writer.wait_for("ready")
            time.sleep(chance.uniform(0, 0.4))
            writer.processes[0].kill()
            assert writer.wait() == [-signal.SIGKILL], writer.output(0)
        for storage_id in listed(root):
            steps = DirectoryStore(root).open(storage_id).metadata()["steps_completed"]
            expected = {f"f{i}": b"%d %d" % (steps, i) * 5000 for i in range(20)}
            assert {n: d for n, d in tree(root / storage_id).items() if n != "metadata.json"} == expected
    with alone() as distributed:
        context = Recorder().context(distributed, root, restart=times)
        last = context.upload(fill(folder / "last"), STEPS)
    assert list((root / ".det_core-tmp").iterdir()) == [], "the next begin collects what the dead left"
    assert DirectoryStore(root).list(RUN)[-1].storage_id == last


def test_a_killed_writer_leaves_whole_checkpoints(tmp_path: Path) -> None:
    killed_writers(tmp_path, 3, seed=1)


def test_a_store_shared_by_users_stays_writable_to_them(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o1777)
    with alone() as distributed:
        Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source"), STEPS)
    assert (tmp_path / "store" / ".det_core-tmp").stat().st_mode & 0o7777 == 0o1777


def test_what_cannot_be_collected_does_not_stop_a_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Disk):
        def remove_tree(self, path: str) -> None:
            if "old" in path:
                raise self.error("remove", path, PermissionError(13, "Permission denied"))
            super().remove_tree(path)

    root = tmp_path / "store"
    DirectoryStore(root).begin("old", Owner(**{**vars(Owner.current(RUN, 0)), "host": "0" * 12}))
    with alone() as distributed:
        context = Recorder().context(distributed, root, restart=1, disk=Stubborn(str(root)))
        storage_id = context.upload(fill(tmp_path / "source"), STEPS)
    assert listed(root) == [storage_id]
    assert "Permission denied" in caplog.text


class Diary(Disk):
    """Remembers what was done."""

    def __init__(self) -> None:
        super().__init__("here")
        self.done: list[tuple[str, str]] = []

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        result = super().do(operation, path, function, *args)
        self.done.append((operation, path))
        return result


@pytest.mark.parametrize("call", ["upload", "store_path"])
def test_every_file_and_folder_is_synced_before_it_is_listed(call: str, tmp_path: Path) -> None:
    disk, large = Diary(), {"large": b"l" * (1 << 20), "other/large": b"l" * (1 << 20)}
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "new" / "store", disk=disk)
        if call == "upload":
            storage_id = context.upload(fill(tmp_path / "source", FILES | large), STEPS)
        else:
            with context.store_path(STEPS) as (path, storage_id):
                fill(path, FILES | large)
    stored = tmp_path / "new" / "store" / storage_id
    listed_at = disk.done.index(("rename", str(stored)))
    synced = {path.partition("/tree")[2] for op, path in disk.done[:listed_at] if op == "sync" and "/tree" in path}
    assert synced == {""} | {f"/{path.relative_to(stored)}" for path in stored.rglob("*")}
    assert ("sync", str(tmp_path / "new" / "store")) in disk.done[listed_at:]
    assert ("sync", str(tmp_path)) in disk.done and ("sync", str(tmp_path / "new")) in disk.done


def test_a_delete_is_on_disk_before_bytes_go(tmp_path: Path) -> None:
    disk = Diary()
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store", disk=disk)
        storage_id = context.upload(fill(tmp_path / "source"), STEPS)
        disk.done.clear()
        context.delete(storage_id)
    operations = [operation for operation, _ in disk.done]
    assert operations.index("rename") < disk.done.index(("sync", str(tmp_path / "store"))) < operations.index("remove")
