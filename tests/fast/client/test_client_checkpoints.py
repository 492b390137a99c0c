"""``client.checkpoints()``: found by storage or by run, read, verified, deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from det_core import client, core
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, RunNotFound
from det_core.journal import RunFolder
from det_core.storage import DirectoryStore
from support.stored import FILES, put, run_with_checkpoints


def test_of_the_newest_run_or_of_one_that_is_named(home: Path, tmp_path: Path) -> None:
    first, store = run_with_checkpoints(home, tmp_path, [10, 20])
    second, _ = run_with_checkpoints(home, tmp_path, [1], storage=tmp_path / "elsewhere")
    newest = client.checkpoints()
    assert (newest.run_id, newest.root) == (second, str(tmp_path / "elsewhere"))
    assert [c.steps_completed for c in newest] == [1]
    older = client.checkpoints(run=first)
    assert (older.root, len(older)) == (store.root, 2)
    assert [c.steps_completed for c in older] == [10, 20], "oldest first"
    one = older["latest"]
    assert (one.storage_id, one.run_id, one.restart) == (f"c20-{first[-6:]}", first, 0)
    assert one.resources == {"empty": 0, "metadata.json": one.resources["metadata.json"], "model.pt": 70_000,
                             "sub/": 0, "sub/optimizer.pt": 1000}  # fmt: skip
    assert (one.files, one.size) == (4, 71_000 + one.resources["metadata.json"])
    assert (one.metadata, one.verified) == ({"steps_completed": 20}, True)
    assert one.path == Path(store.root, one.storage_id)


def test_by_storage_with_and_without_a_run(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = [run_with_checkpoints(home, tmp_path, [10, 20], storage=shared, name=n)[0] for n in "ab"]
    every = client.checkpoints(storage=shared)
    assert (every.run_id, every.run_ids(), len(every)) == (None, sorted(runs), 4)
    assert len(client.checkpoints(storage=f"file://{shared}", run=runs[0])) == 2
    mapping = {"type": "directory", "container_path": str(shared)}
    assert len(client.checkpoints(storage=mapping)) == len(client.checkpoints(storage=json.dumps(mapping))) == 4
    put(DirectoryStore(shared), "gone", 5, tmp_path, run_id="20200101-000000-abcdef")
    assert [c.storage_id for c in client.checkpoints(storage=shared, run="2020")] == ["gone"], "known to the store only"
    with pytest.raises(RunNotFound, match="it has checkpoints of 20200101-000000-abcdef"):
        client.checkpoints(storage=shared, run="nope")
    with pytest.raises(ValueError, match="begins like JSON, but is none"):
        client.checkpoints(storage='{"type": directory}')


def test_an_id_may_be_abbreviated(home: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for ordinal, name in enumerate(["abc", "abcd", "abx", "latest-one"], 1):
        put(store, name, ordinal, tmp_path, ordinal=ordinal)
    found = client.checkpoints(storage=store.root)
    assert [found[name].storage_id for name in ("abc", "abcd", "abx", "l")] == ["abc", "abcd", "abx", "latest-one"]
    assert found["latest"].storage_id == "latest-one"
    with pytest.raises(CheckpointNotFound, match="3 checkpoints begin with 'ab': abc, abcd, abx; give more of the ID"):
        found["ab"]
    with pytest.raises(ValueError, match="storage_id is empty"):
        found[""]
    with pytest.raises(ValueError, match="holds a path separator"):
        found["a/abc"]


def test_download(home: Path, tmp_path: Path) -> None:
    _, store = run_with_checkpoints(home, tmp_path, [10])
    done: list[int] = []
    held: list[set[str]] = []

    def progress(count: int) -> None:
        done.append(count)
        held.append(store.in_use())

    one = client.checkpoints()["latest"]
    one.download(tmp_path / "out", progress=progress)
    assert {p: (tmp_path / "out" / p).read_bytes() for p in FILES} == FILES
    assert sum(done) == one.size
    assert {one.storage_id} in held, "it is held meanwhile"
    assert store.in_use() == set()
    one.download(tmp_path / "part", selector=lambda path: path == "model.pt")
    assert [p.name for p in (tmp_path / "part").iterdir()] == ["model.pt"]
    Path(store.root, one.storage_id, "model.pt").write_bytes(b"x" * 70_000)
    with pytest.raises(CheckpointCorrupt, match=r"model\.pt"):
        one.download(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_what_is_deleted_is_noted_in_the_journal_of_its_run(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20, 30, 40])
    before = client.run(run_id)
    client.checkpoints()[f"c20-{run_id[-6:]}"].delete()
    after = client.run(run_id)
    assert [c["metadata"]["steps_completed"] for c in after.checkpoints()] == [10, 30, 40]
    assert (after.state, after.restarts) == (before.state, before.restarts)
    assert client.checkpoints().gc(core.KeepLatest(1)) == [f"c10-{run_id[-6:]}", f"c30-{run_id[-6:]}"]
    assert [c["metadata"]["steps_completed"] for c in client.run(run_id).checkpoints()] == [40]
    assert caplog.text == ""
    live = RunFolder.open(home, run_id)
    live.begin_restart()
    try:
        client.checkpoints()["latest"].delete()
    finally:
        live.release()
    assert f"run {run_id} is running, so its record still names what was deleted" in caplog.text
    assert store.list() == []
