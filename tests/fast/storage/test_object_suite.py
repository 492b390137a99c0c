"""The conformance suite on an object store in memory, and what S3 adds; ``tests/stores`` has it on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core.storage import Store, open_store
from det_core.storage._object_store import ObjectStore
from det_core.storage._threads import map_threads
from support.buckets import closing, keys, put
from support.servers import S3Server
from support.store_suite import FILES, CheckpointStoreSuite, stored


def folders_of_determined(store: ObjectStore, folder: Path, put: Callable[[str, bytes], object]) -> None:
    """Of a checkpoint with an object for each folder, as Determined writes it: they come back, and go."""
    objects = {"theirs/": b"", "theirs/model": b"m", "theirs/sub/": b"", "theirs/sub/x": b"x", "theirs/sub/empty/": b""}
    for key, data in objects.items():
        put(key, data)
    found = store.open("theirs")
    assert found.manifest.resources == {"model": 1, "sub/": 0, "sub/empty/": 0, "sub/x": 1}
    found.copy_to(folder / "out", found.manifest.files, found.manifest.directories)
    assert {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*")} == {
        "model", "sub", "sub/x", "sub/empty",
    }  # fmt: skip
    assert store.delete("theirs", ["sub/x"]) == {"model": 1, "sub/empty/": 0, "sub/": 0}
    assert store.delete("theirs") == {}
    assert keys(store) == set()


class Objects:
    """How the suite makes an object store of any kind, and looks into it."""

    @pytest.fixture(autouse=True)
    def stores(self) -> Iterator[None]:
        with closing() as self.opened:
            yield

    def storage(self, folder: Path) -> Any:
        """``checkpoint_storage`` for a place of this test alone."""
        raise NotImplementedError

    def make_store(self, folder: Path) -> Store:
        return self.opened(open_store(self.storage(folder), folder, scratch=folder.parent / "scratch"))

    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        assert isinstance(store, ObjectStore)
        key = f"{storage_id}/{path}"
        if change is None:
            return store.driver.remove([key])
        put(store, key, change(store.driver.get(key)))

    def beside(self, store: Store, name: str) -> bytes:
        assert isinstance(store, ObjectStore)
        return store.driver.get(name)


class OnObjects(Objects, CheckpointStoreSuite):
    """The suite on object stores."""


class S3(Objects):
    """What S3 adds, on the server that ``server`` gives."""

    @pytest.fixture(autouse=True)
    def bucket(self, server: S3Server) -> None:
        self.server, self.name = server, server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return self.server.storage(self.name, "a prefix/of it")

    def at(self, folder: Path, prefix: str, **changes: Any) -> ObjectStore:
        """A store of another prefix in the same bucket."""
        found: ObjectStore = self.opened(open_store({**self.server.storage(self.name, prefix), **changes}, folder))
        return found

    def test_a_prefix_keeps_stores_apart(self, tmp_path: Path) -> None:
        one, more, whole = (self.at(tmp_path, prefix) for prefix in ("one", "one-more", ""))
        for store, name in ((one, "a"), (more, "b"), (whole, "c")):
            stored(store, tmp_path, name)
        assert [[found.storage_id for found in store.list()] for store in (one, more, whole)] == [["a"], ["b"], ["c"]]
        one.delete("a")
        assert (keys(one), one.list()) == (set(), [])
        more.open("b").check(FILES)

    def test_folders_that_determined_put_come_back_and_go(self, tmp_path: Path) -> None:
        with self.server.client() as client:
            folders_of_determined(
                self.at(tmp_path, "d"),
                tmp_path,
                lambda key, data: client.put_object(Bucket=self.name, Key=f"d/{key}", Body=data),
            )

    def test_a_public_object_needs_no_keys(self, tmp_path: Path) -> None:
        with self.server.client() as client:
            client.put_object(Bucket=self.name, Key="open/theirs/file", Body=b"data", ACL="public-read")
        store = self.at(tmp_path, "open", anonymous=True, access_key=None, secret_key=None)
        assert store.driver.get("theirs/file") == b"data"


class OnS3(S3, CheckpointStoreSuite):
    """The suite on S3, and what that adds."""

    def test_what_takes_several_pages_is_listed_and_deleted_whole(self, tmp_path: Path) -> None:
        store = self.at(tmp_path, "many")
        map_threads(lambda number: put(store, f"theirs/{number:04}"), range(1001), 16)
        assert len(store.open("theirs").manifest.files) == 1001
        assert store.delete("theirs") == {}
        assert keys(store) == set()


class TestInMemory(OnObjects):
    def storage(self, folder: Path) -> str:
        return f"memory:/{folder}"


class TestOnS3(S3):
    """With the tests of the suite in which the driver has a part of its own."""

    @pytest.fixture
    def server(self, moto_server: S3Server) -> S3Server:
        return moto_server

    test_what_is_put_comes_back = CheckpointStoreSuite.test_what_is_put_comes_back
    test_many_chunks = CheckpointStoreSuite.test_many_chunks
    test_several_ranks_write_one_checkpoint = CheckpointStoreSuite.test_several_ranks_write_one_checkpoint
    test_an_unknown_id_is_not_found = CheckpointStoreSuite.test_an_unknown_id_is_not_found
    test_a_file_of_another_size_is_found = CheckpointStoreSuite.test_a_file_of_another_size_is_found
    test_delete_removes_what_globs_match = CheckpointStoreSuite.test_delete_removes_what_globs_match
    test_what_is_held_is_in_use_until_it_is_let_go = CheckpointStoreSuite.test_what_is_held_is_in_use_until_it_is_let_go
    test_files_are_put_beside = CheckpointStoreSuite.test_files_are_put_beside
