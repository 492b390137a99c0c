"""What every driver of an object store must do, as tests to inherit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from det_core.storage._objects._bucket import Bucket, KeyMissing

T = TypeVar("T")
NAMES = [
    "plain",
    "a b",
    "\u00fcml\u00e4ut-\u4e2d",
    ".hidden",
    "sub/.x/y",
    "q?&=#%25+~'\"*",
    "a//b",
    "x" * 200,
    "\U0001f600",
    *(" lead", "trail ", "a  b", "..dots", "e\u0301", "%41%2F", "?x=1", "[x]{y}*"),
    *("~", "back\\slash", "co:lon;", "tab\there"),
]


def call(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await a driver's method in fsspec's event loop."""
    from fsspec.asyn import get_loop

    async def awaited() -> T:
        return await function(*arguments)

    return asyncio.run_coroutine_threadsafe(awaited(), get_loop()).result()


class BucketBehaviour:
    """Inherit, and give a ``bucket`` fixture that is an empty bucket and is closed at the end."""

    names = NAMES
    many = 1100
    """Keys that one page of a listing cannot hold."""

    def test_bytes_come_back(self, bucket: Bucket) -> None:
        for size in (0, 1, 4096, 1 << 20, (1 << 20) + 1, 5_000_000):
            data = os.urandom(size)
            call(bucket.put, f"size/{size}", data)
            assert call(bucket.get, f"size/{size}") == data
        call(bucket.put, "view", memoryview(b"0123456789")[2:5])
        assert call(bucket.get, "view") == b"234"

    def test_a_put_replaces(self, bucket: Bucket) -> None:
        call(bucket.put, "key", b"before, and longer")
        call(bucket.put, "key", b"after")
        assert call(bucket.get, "key") == b"after"

    def test_ranges(self, bucket: Bucket) -> None:
        data = os.urandom(1000)
        call(bucket.put, "key", data)
        for start, end in ((0, 1), (0, 1000), (10, 20), (990, None), (999, 1000), (500, 5000)):
            assert call(bucket.get, "key", start, end) == data[start:end], (start, end)
        assert call(bucket.get, "key", 1000, 1001) == b""

    def test_what_is_not_there_is_missing(self, bucket: Bucket) -> None:
        for part in ((), (0, 10), (5, None)):
            with pytest.raises(KeyMissing):
                call(bucket.get, "no/such key", *part)

    def test_names(self, bucket: Bucket) -> None:
        for number, name in enumerate(self.names):
            call(bucket.put, f"names/{name}", str(number).encode())
        for number, name in enumerate(self.names):
            assert call(bucket.get, f"names/{name}") == str(number).encode()
        assert {e.key for e in call(bucket.list, "names/")} == {f"names/{name}" for name in self.names}
        call(bucket.delete, [f"names/{name}" for name in self.names])
        assert call(bucket.list, "names/") == []

    def test_lists(self, bucket: Bucket) -> None:
        keys = ["a/1", "a/b/2", "a/b/c/3", "ab/4", "top"]
        for key in keys:
            call(bucket.put, key, key.encode())
        found = call(bucket.list, "a/")
        assert [(e.key, e.size) for e in found] == [("a/1", 3), ("a/b/2", 5), ("a/b/c/3", 7)]
        assert all(abs(e.modified - time.time()) < 600 for e in found)
        assert [e.key for e in call(bucket.list, "")] == keys
        assert [e.key for e in call(bucket.list, "a")] == keys[:4]
        assert call(bucket.list, "none/") == []
        assert call(bucket.children, "") == ["a/", "ab/", "top"]
        assert call(bucket.children, "a/") == ["1", "b/"]
        assert call(bucket.children, "none/") == []

    def test_many_keys_take_several_pages(self, bucket: Bucket) -> None:
        keys = [f"many/{i:04}" for i in range(self.many)]

        async def put_all() -> None:
            for first in range(0, len(keys), 32):
                await asyncio.gather(*(bucket.put(key, b"x") for key in keys[first : first + 32]))

        call(put_all)
        assert [e.key for e in call(bucket.list, "many/")] == keys
        assert call(bucket.children, "many/") == [key[5:] for key in keys]
        call(bucket.delete, keys)
        assert call(bucket.list, "") == []

    def test_deleting_what_is_not_there_is_no_error(self, bucket: Bucket) -> None:
        call(bucket.put, "there", b"x")
        call(bucket.delete, ["not there", "there"])
        call(bucket.delete, ["there"])
        call(bucket.delete, [])
        assert call(bucket.list, "") == []

    def test_parts(self, bucket: Bucket) -> None:
        size = bucket.part_size(40 << 20)
        assert size <= 40 << 20
        data = os.urandom(1 << 20) * 40
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        upload = call(bucket.begin_parts, "large", len(data))
        tags = {n: call(bucket.put_part, upload, n, parts[n - 1]) for n in reversed(range(1, len(parts) + 1))}
        assert call(bucket.list, "large") == []
        call(bucket.finish_parts, upload, [tags[n] for n in sorted(tags)])
        call(bucket.finish_parts, upload, [tags[n] for n in sorted(tags)])  # as after an answer that was lost
        assert call(bucket.get, "large") == data
        assert [(e.key, e.size) for e in call(bucket.list, "")] == [("large", len(data))]
        call(bucket.abort_parts, upload)
        assert call(bucket.get, "large", 5, 10) == data[5:10]

    def test_parts_that_are_given_up_leave_nothing(self, bucket: Bucket) -> None:
        upload = call(bucket.begin_parts, "large", 20 << 20)
        call(bucket.put_part, upload, 1, bytes(16 << 20))
        call(bucket.abort_parts, upload)
        call(bucket.abort_parts, upload)
        assert call(bucket.list, "") == [] and call(bucket.stale_parts, "") == []

    def test_unfinished_parts_are_found_by_prefix(self, bucket: Bucket) -> None:
        for key in ("one/large", "one/deep/er", "other/large"):
            call(bucket.put_part, call(bucket.begin_parts, key, 20 << 20), 1, bytes(5 << 20))
        stale = call(bucket.stale_parts, "one/")
        assert len(stale) == 2
        for upload in stale:
            call(bucket.abort_parts, upload)
        assert call(bucket.stale_parts, "one/") == [] and len(call(bucket.stale_parts, "")) == 1

    def test_very_large_objects_have_few_parts(self, bucket: Bucket) -> None:
        for size in (1 << 20, 1 << 30, 1 << 40, 5 << 40):
            assert -(-size // bucket.part_size(size)) <= 10_000

    def test_it_works_again_after_close(self, bucket: Bucket) -> None:
        call(bucket.put, "key", b"data")
        call(bucket.close)
        call(bucket.close)
        assert call(bucket.get, "key") == b"data"
