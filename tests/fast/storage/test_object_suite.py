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
    """The suite on an object store of any kind."""

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
    """The suite's additions for S3, on the server of the fixture ``server``."""

    @pytest.fixture(autouse=True)
    def bucket(self, server: S3Server) -> None:
        self.server, self.name = server, server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return self.server.storage(self.name, "a prefix/of it")

    def at(self, folder: Path, prefix: str, **changes: Any) -> ObjectStore:
        """Return a store of another prefix in the same bucket."""
        found: ObjectStore = self.opened(open_store({**self.server.storage(self.name, prefix), **changes}, folder))
        return found

    def test_stores_with_different_prefixes_are_separate(self, tmp_path: Path) -> None:
        one, more, whole = (self.at(tmp_path, prefix) for prefix in ("one", "one-more", ""))
        for store, name in ((one, "a"), (more, "b"), (whole, "c")):
            stored(store, tmp_path, name)
        assert [[found.storage_id for found in store.list()] for store in (one, more, whole)] == [["a"], ["b"], ["c"]]
        one.delete("a")
        assert (keys(one), one.list()) == (set(), [])
        more.open("b").check(FILES)

    def test_directory_objects_of_determined_are_read_and_deleted(self, tmp_path: Path) -> None:
        with self.server.client() as client:
            folders_of_determined(
                self.at(tmp_path, "d"),
                tmp_path,
                lambda key, data: client.put_object(Bucket=self.name, Key=f"d/{key}", Body=data),
            )

    def test_anonymous_store_reads_public_objects(self, tmp_path: Path) -> None:
        with self.server.client() as client:
            client.put_object(Bucket=self.name, Key="open/theirs/file", Body=b"data", ACL="public-read")
        store = self.at(tmp_path, "open", anonymous=True, access_key=None, secret_key=None)
        assert store.driver.get("theirs/file") == b"data"


class OnS3(S3, CheckpointStoreSuite):
    """The suite on S3, and what that adds."""

    def test_listing_of_several_pages_is_complete(self, tmp_path: Path) -> None:
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

    test_put_files_are_read_back = CheckpointStoreSuite.test_put_files_are_read_back
    test_file_of_many_chunks_is_read_back = CheckpointStoreSuite.test_file_of_many_chunks_is_read_back
    test_several_ranks_commit_one_checkpoint = CheckpointStoreSuite.test_several_ranks_commit_one_checkpoint
    test_open_of_unknown_id_is_not_found = CheckpointStoreSuite.test_open_of_unknown_id_is_not_found
    test_check_detects_another_size = CheckpointStoreSuite.test_check_detects_another_size
    test_delete_with_globs_removes_matching_files = CheckpointStoreSuite.test_delete_with_globs_removes_matching_files
    test_read_lease_marks_a_checkpoint_in_use = CheckpointStoreSuite.test_read_lease_marks_a_checkpoint_in_use
    test_put_file_replaces_and_remove_folder_removes = (
        CheckpointStoreSuite.test_put_file_replaces_and_remove_folder_removes
    )
