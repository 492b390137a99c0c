"""Requests to an S3 server fail once, or from then on, in every way a network or a busy server has.

Here every second and every third request; each of them, by every fault: ``tests/long/test_storage_s3_faults.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from det_core.errors import CheckpointError, StorageError
from det_core.storage import Owner, Store, open_store, scan
from det_core.storage._object_store import ObjectStore
from support.buckets import closing, keys, unfinished
from support.proxy import BUSY, LOST, RESET, TRUNCATED, Proxy, Request, proxy_before
from support.servers import S3Server
from support.store_suite import FILES, METADATA, fill, header, owner, stored

LARGE = (32 << 20) + 5
"""s3fs sends what is smaller in one piece."""
Operation = Callable[[ObjectStore, Path], None]


def upload(store: ObjectStore, folder: Path) -> None:
    """Upload small files."""
    stored(store, folder, "new", ordinal=9)


def upload_large(store: ObjectStore, folder: Path) -> None:
    """Upload a file of three parts."""
    source = folder / "large"
    source.mkdir(exist_ok=True)
    (source / "large.bin").write_bytes(bytes(LARGE))
    staging = store.begin("new", owner())
    try:
        staging.commit(staging.put(scan(store.disk, str(source))), [], METADATA, header("new", ordinal=9))
    except BaseException:
        staging.abort()
        raise


def restore(store: ObjectStore, folder: Path) -> None:
    """Restore all of a checkpoint, verified."""
    found = store.open("one")
    assert found.metadata() == METADATA
    found.copy_to(folder / f"out-{os.urandom(4).hex()}", [*FILES], [])


def look(store: ObjectStore, folder: Path) -> None:
    """List the checkpoints."""
    assert "one" in [h.storage_id for h in store.list("run")]
    assert store.in_use() == set()


def delete(store: ObjectStore, folder: Path) -> None:
    """Delete a whole checkpoint."""
    store.delete("two")
    assert "two" not in [h.storage_id for h in store.list()]


def collect(store: ObjectStore, folder: Path) -> None:
    """Collect the files of a dead writer."""
    assert store.collect() == ["dead"]


OPERATIONS: list[Operation] = [upload, restore, look, delete, collect]
ONCE = [(upload, LOST), (restore, TRUNCATED), (restore, BUSY), (delete, LOST), (collect, RESET)]


@pytest.fixture(scope="module")
def proxy(moto_server: S3Server) -> Iterator[Proxy]:
    with proxy_before(moto_server.url) as running:
        yield running


class Case:
    """A store with two checkpoints behind a proxy."""

    def __init__(self, server: S3Server, proxy: Proxy, folder: Path, close_later: Callable[[Store], Store]) -> None:
        self.server, self.proxy, self.folder, self.close_later = server, proxy, folder, close_later
        self.bucket = server.make_bucket()
        self.straight = self.open(server.url)
        for name in ("one", "two"):
            stored(self.straight, folder, name, ordinal=1 + (name == "two"))

    def open(self, url: str) -> ObjectStore:
        """Open the store at an address."""
        storage = self.server.storage(self.bucket, "p", endpoint_url=url)
        store = self.close_later(open_store(storage, self.folder, scratch=self.folder / "scratch"))
        assert isinstance(store, ObjectStore)
        return store

    def leave_something(self) -> None:
        """Leave the objects of a writer that died in the middle."""
        dead = Owner(**{**vars(owner()), "pid": 2**22 + 1, "started": 5})
        staging = self.straight.begin("dead", dead)
        fill(self.folder / "source")
        staging.put(scan(self.straight.disk, str(self.folder / "source")))

    def is_sound(self) -> None:
        """Check that listed checkpoints are intact and others can be collected."""
        for head in self.straight.list():
            found = self.straight.open(head.storage_id)
            found.check(found.manifest.files)
        self.straight.collect(Owner(**{**vars(owner()), "restart": 7}))
        listed = {head.storage_id for head in self.straight.list()}
        found = keys(self.straight)
        assert {key.split("/")[0] for key in found} == listed, found
        assert unfinished(self.straight) == []


def without_patience(store: ObjectStore) -> ObjectStore:
    """Return the same store with one try per request."""
    fs = store.driver.fs
    fs.retries = 1
    fs.config_kwargs = {**fs.config_kwargs, "retries": {"total_max_attempts": 1}}
    return store


def at(number: int, fault: str) -> Callable[[int, Request], str | None]:
    """Return a plan with one fault."""
    return lambda n, request: fault if n == number else None


def after(number: int, fault: str) -> Callable[[int, Request], str | None]:
    """Run an operation under a lasting fault."""
    return lambda n, request: fault if n >= number else None


@pytest.mark.parametrize(("operation", "fault"), ONCE)
def test_one_network_fault_is_retried(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, operation: Operation, fault: str, step: int = 2
) -> None:
    with closing() as close_later:
        case = Case(moto_server, proxy, tmp_path, close_later)
        number, total = 1, 1
        while number <= total:
            store = case.open(proxy.url)
            if operation is collect:
                case.leave_something()
            proxy.begin(at(number, fault))
            operation(store, tmp_path)
            total = max(total, len(proxy.requests) - 1)
            proxy.begin()
            case.is_sound()
            _as_before(case, operation)
            number += step
        assert number > 1 + step


def _as_before(case: Case, operation: Operation) -> None:
    if operation in (upload, upload_large):
        case.straight.delete("new")
    if operation is delete:
        stored(case.straight, case.folder, "two", ordinal=2)


@pytest.mark.parametrize("fault", [LOST])
def test_one_network_fault_in_a_multipart_upload_is_retried(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, fault: str, numbers: Sequence[int] = (1, 2, 5)
) -> None:
    """Of the five: begin, three parts, finish."""
    with closing() as close_later:
        case = Case(moto_server, proxy, tmp_path, close_later)
        for number in numbers:
            of_parts: list[Request] = []

            def plan(_: int, request: Request, number: int = number, of_parts: list[Request] = of_parts) -> str | None:
                if "upload" not in request.path.partition("?")[2]:
                    return None
                of_parts.append(request)
                return fault if len(of_parts) == number else None

            proxy.begin(plan)
            upload_large(case.open(proxy.url), tmp_path)
            assert len(of_parts) >= 5, of_parts
            proxy.begin()
            case.is_sound()
            case.straight.delete("new")


@pytest.mark.parametrize(("operation", "fault"), [(upload, LOST), (restore, RESET), (delete, LOST)])
def test_lasting_network_fault_is_named_and_leaves_nothing_listed(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, operation: Operation, fault: str, step: int = 3
) -> None:
    with closing() as close_later:
        case = Case(moto_server, proxy, tmp_path, close_later)
        number = 1
        while True:
            store = without_patience(case.open(proxy.url))
            proxy.begin(after(number, fault))
            try:
                operation(store, tmp_path)
                break
            except CheckpointError as e:
                assert isinstance(e, StorageError), repr(e)
                assert f"checkpoint store s3://{case.bucket}/p: cannot " in str(e)
            finally:
                proxy.begin()
                close_later(store)
            case.is_sound()
            assert "one" in {h.storage_id for h in case.straight.list()}
            if operation is not restore:
                case.straight.delete("new")
            if operation is delete and "two" not in {h.storage_id for h in case.straight.list()}:
                stored(case.straight, tmp_path, "two", ordinal=2)
            number += step
        assert number > 1
