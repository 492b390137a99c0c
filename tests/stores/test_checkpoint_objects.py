"""Every method of the checkpoint context on S3 and GCS: by four processes together, and with what is not usual."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import support
from det_core.errors import CheckpointNotFound, PeerLost
from det_core.storage import Owner, Store, open_store
from fast.core.test_checkpoint_torch import lines, run
from support.buckets import closing, contents
from support.checkpoints import FILES, RUN, STEPS, Recorder, alone, fill, tree
from support.ranks import running
from support.servers import S3Server

TESTS = str(support.TESTS)
RANKS = "from support.object_ranks import main; main()"
WHEN_BUSY = ("it is tried again", "has waited for 10 s for", "responded after")
"""Warnings of det_core on a busy machine."""


@pytest.fixture(params=["moto", "rgw", "gcs"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the ``checkpoint_storage`` for a directory of a new bucket on each server."""
    server = request.getfixturevalue(f"{request.param}_server")
    bucket = server.make_bucket()
    if request.param == "gcs":
        return {"type": "gcs", "bucket": bucket, "prefix": "the prefix", "endpoint_url": server.url}
    found: dict[str, Any] = server.storage(bucket, "the prefix")
    return found


@pytest.fixture
def opened(storage: dict[str, Any], tmp_path: Path) -> Iterator[Callable[[], Any]]:
    with closing() as take:
        yield lambda: take(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))


def test_four_processes_share_a_store(storage: dict[str, Any], tmp_path: Path) -> None:
    share_every_method(storage, tmp_path, count=12, size=2)


def share_every_method(storage: dict[str, Any], tmp_path: Path, count: int, size: int) -> None:
    """Run every method on four ranks, each with ``count`` small files and one of ``size`` MB."""
    arguments = (json.dumps(storage), str(tmp_path), str(count), str(size))
    with running(RANKS, 4, tmp_path, env={"PYTHONPATH": TESTS}, args=arguments) as ranks:
        statuses = ranks.wait()
        said = [ranks.output(rank).split("\n") for rank in range(4)]
        said = [[line for line in lines if not any(words in line for words in WHEN_BUSY)] for lines in said]
        assert statuses == [0] * 4, "\n".join(ranks.output(rank)[-1500:] for rank in range(4))
    assert said == [["uploaded", "stored", "checked", "checked", "done", ""]] * 4
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    with closing() as take:
        assert contents(take(open_store(storage, tmp_path))) == {}


def test_directories_and_unusual_names_are_read_back(opened: Callable[[], Any], tmp_path: Path) -> None:
    names = [
        ".dot",
        "..dots",
        " lead",
        "trail ",
        "a  b",
        "\u00e9",
        "e\u0301",
        "\u4e2d/\U0001f600",
        "%41%2F",
        "#",
        "?x=1",
        "a+b",
    ]
    names += ["a&b=c", "*", "[x]", "{y}", "~", "'\"", "back\\slash", "co:lon", "se;mi", "tab\there", "n" * 200]
    files = {name: f"<{name}>".encode() for name in names} | {f"in/{name}": b"" for name in names}
    source = fill(tmp_path / "source", files)
    (source / "empty folder" / "inner").mkdir(parents=True)
    with alone() as distributed:
        recorder = Recorder()
        context = recorder.context(distributed, tmp_path, store=opened())
        storage_id = context.upload(source, STEPS)
        with context.restore_path(storage_id) as path:
            found = tree(path)
            assert found.pop("metadata.json")
            assert found == files
            assert (path / "empty folder" / "inner").is_dir()
        assert set(recorder.registered[0]["resources"]) >= {*files, "empty folder/", "empty folder/inner/"}
        context.delete(storage_id)
        with pytest.raises(CheckpointNotFound):
            context.get_metadata(storage_id)
        context.close()


KILLED = """
import json, os, signal, sys
from pathlib import Path
from det_core import core
from det_core.errors import DetCoreError
from det_core.storage import open_store
from support.checkpoints import Recorder, fill

with core.DistributedContext.from_torch_distributed() as distributed:
    folder = Path(sys.argv[2])
    store = open_store(json.loads(sys.argv[1]), folder, scratch=folder / "scratch")
    context = Recorder().context(distributed, folder, store=store)
    try:
        with context.store_path({"steps_completed": 1}, shard=True) as (path, storage_id):
            fill(path, {f"of {distributed.rank}/{i}": b"x" * 1000 for i in range(int(sys.argv[3]))})
        print("stored", flush=True)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
    store.close()
"""
DIES = """
from det_core.storage._drivers import Driver
import os, sys
put_file = Driver.put_file
def dying(self, source, key, moved):
    if f"of 1/{int(sys.argv[3]) * 2 // 3}" in key:
        os.kill(os.getpid(), 9)
    return put_file(self, source, key, moved)
Driver.put_file = dying
"""


def test_rank_killed_during_upload_leaves_nothing_listed(storage: dict[str, Any], tmp_path: Path) -> None:
    kill_one_of_three(storage, tmp_path, count=30)


def kill_one_of_three(storage: dict[str, Any], tmp_path: Path, count: int) -> None:
    """Kill one rank of three while it uploads ``count`` files."""
    arguments = (json.dumps(storage), str(tmp_path), str(count))
    with running(DIES + KILLED, 3, tmp_path, env={"PYTHONPATH": TESTS}, args=arguments) as ranks:
        assert ranks.wait() == [0, -9, 0]
        for rank in (0, 2):
            assert PeerLost.__name__ in ranks.output(rank) and "rank 1" in ranks.output(rank)
            assert "stored" not in ranks.output(rank)
    with closing() as take:
        store: Store = take(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
        assert store.list() == []
        with alone() as distributed:
            context = Recorder().context(distributed, tmp_path, store=store, restart=1)
            storage_id = context.upload(fill(tmp_path / "source"), STEPS)
            context.close()
        assert store.collect(Owner.current(RUN, 1)) == []
        assert {key.split("/")[0] for key in contents(store)} == {storage_id}  # type: ignore[arg-type]
        store.open(storage_id).check(FILES)
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


def test_shards_come_back_from_a_bucket(tmp_path: Path, moto_server: S3Server) -> None:
    """Save in the background to a store other than a directory, and restore on fewer ranks."""
    storage = moto_server.storage(moto_server.make_bucket(), "prefix")
    saved = lines(run(tmp_path, 2, "save", storage, "async"), "saved")
    assert saved[0] == saved[1] and len(saved[0]) == 2
    storage_id, digest = saved[0][0]
    assert lines(run(tmp_path, 1, "restore", storage, storage_id), "restored") == [[[digest]]]
    assert list(tmp_path.rglob("*.distcp")) == [], "what is written and what is fetched goes when it has served"
