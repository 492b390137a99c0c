"""Google Cloud Storage, over its JSON API, by the session and the credentials of gcsfs.

Every object that is sent, and every part of one, is compared with the CRC32C that the service computed of what
arrived. A large object is stored as parts side by side, which the service then composes into one; the parts lie under
``.det_core-parts/<key>/`` meanwhile.
https://cloud.google.com/storage/docs/json_api/v1, https://cloud.google.com/storage/docs/composing-objects
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import datetime
import json
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from det_core._optional import require
from det_core.errors import StorageError
from det_core.storage._objects import _gcs_errors
from det_core.storage._objects._bucket import Entry, KeyMissing
from det_core.storage._objects._gcs_errors import Refused

PART = 16 << 20
PARTS = 1024
"""More than these, and they are larger: each is an object to make and to delete."""
COMPOSED = 32
"""The most objects that the service composes at a time."""
CONCURRENCY = 32
BYTES = "application/octet-stream"
PARTS_FOLDER = ".det_core-parts/"
CONNECT_TIMEOUT, SILENCE = 10.0, 60.0
"""Seconds to make a connection, and in which a server must say something."""


class Upload(NamedTuple):
    """An object that is stored in parts."""

    key: str
    folder: str
    """Where they lie, as a key."""
    size: int | None
    """Of the whole; None if somebody else began it."""


class GcsBucket:
    """A bucket, or a folder of one.

    Args:
        bucket: its name.
        prefix: the folder, without slashes around it; empty: the whole bucket.
        endpoint_url: a server that is not Google's, such as an emulator.
        anonymous: send no credentials; None: as a plain ``http://`` endpoint, such as an emulator's, wants none.

    Raises:
        MissingExtra: gcsfs is not installed.
    """

    concurrency = CONCURRENCY
    concludes = False

    def __init__(
        self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None, anonymous: bool | None = None
    ) -> None:
        self._gcsfs = require("gcsfs.core", extra="gcs", purpose="a checkpoint store on Google Cloud Storage")
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._base = bucket, f"{prefix}/" if prefix else ""
        self._endpoint, self._anonymous = endpoint_url, anonymous
        self._file_system: Any = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Give all connections back."""
        file_system, self._file_system = self._file_system, None
        if file_system is not None:
            await (await file_system._set_session()).close()

    def part_size(self, size: int) -> int:
        """16 MiB, or more for what would have more than a thousand parts."""
        return max(PART, -(-size // PARTS))

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object."""
        await self._insert(self._base + key, data)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of an object."""
        part = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        path = f"/download/storage/v1/b/{self._bucket}/o/{_quoted(self._base + key)}"
        try:
            return await self._call("GET", path, {"alt": "media"}, headers=part)
        except Refused as e:
            if e.status == 404 and not e.is_of_bucket:
                raise KeyMissing(key) from e
            if e.status == 416:
                return b""
            raise

    async def begin_parts(self, key: str, size: int) -> Upload:
        """Begin an object of several parts."""
        return Upload(key, f"{PARTS_FOLDER}{key}/{uuid.uuid4().hex}", size)

    async def put_part(self, upload: Upload, number: int, data: bytes | memoryview) -> str:
        """Store a part, as an object of its own."""
        part = f"{self._base}{upload.folder}/{number:06}"
        await self._insert(part, data)
        return part

    async def finish_parts(self, upload: Upload, parts: builtins.list[Any]) -> None:
        """Compose the parts and remove them. If an earlier call did, whose answer was lost, it is no error."""
        try:
            await self._compose_all(upload, parts)
        except Refused as e:
            if e.status != 404 or e.is_of_bucket or await self._size(upload.key) != upload.size:
                raise
        await self.abort_parts(upload)

    async def _compose_all(self, upload: Upload, parts: builtins.list[str]) -> None:
        level = 0
        while len(parts) > COMPOSED:
            groups = [parts[i : i + COMPOSED] for i in range(0, len(parts), COMPOSED)]
            targets = [f"{self._base}{upload.folder}/{level}-{i:06}" for i in range(len(groups))]
            await _all([partial(self._compose, *pair) for pair in zip(groups, targets, strict=True)])
            parts, level = targets, level + 1
        await self._compose(parts, self._base + upload.key)

    async def _size(self, key: str) -> int | None:
        path = f"/storage/v1/b/{self._bucket}/o/{_quoted(self._base + key)}"
        try:
            return int(json.loads(await self._call("GET", path, {"fields": "size"}))["size"])
        except Refused:
            return None

    async def abort_parts(self, upload: Upload) -> None:
        """Remove the parts."""
        await self.delete([entry.key for entry in await self.list(f"{upload.folder}/")])

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every object under a prefix."""
        start = len(self._base)
        fields = "nextPageToken,items(name,size,updated)"
        return [
            Entry(item["name"][start:], int(item["size"]), _seconds(item.get("updated")))
            for page in await self._pages({"prefix": self._base + prefix, "fields": fields})
            for item in page.get("items", ())
        ]

    async def children(self, prefix: str) -> builtins.list[str]:
        """What lies directly in a folder."""
        whole = self._base + prefix
        names: set[str] = set()
        for page in await self._pages(
            {"prefix": whole, "delimiter": "/", "fields": "nextPageToken,prefixes,items(name)"}
        ):
            names.update(name[len(whole) :] for name in page.get("prefixes", ()))
            names.update(item["name"][len(whole) :] for item in page.get("items", ()))
        return sorted(names - {""})

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, many at a time."""
        await _all([partial(self._remove, key) for key in keys])

    async def stale_parts(self, prefix: str) -> builtins.list[Upload]:
        """What was begun under a prefix and never finished."""
        folders = {entry.key.rpartition("/")[0] for entry in await self.list(PARTS_FOLDER + prefix)}
        return [Upload(f[len(PARTS_FOLDER) :].rpartition("/")[0], f, None) for f in sorted(folders)]

    def retryable(self, error: Exception) -> bool:
        """Throttled, overloaded, or the connection failed."""
        return _gcs_errors.is_passing(error)

    def retry_after(self, error: Exception) -> float | None:
        """The seconds that the server asked for."""
        return error.retry_after if isinstance(error, Refused) else None

    def explain(self, operation: str, key: str, error: Exception) -> StorageError:
        """One line for what was refused."""
        return _gcs_errors.explain(self.url, self._bucket, self._endpoint, operation, key, error)

    async def _insert(self, name: str, data: bytes | memoryview) -> None:
        import google_crc32c

        from det_core.storage._objects._body import Body

        path = f"/upload/storage/v1/b/{self._bucket}/o"
        if data:
            query = {"uploadType": "media", "name": name, "fields": "crc32c"}
            answer = await self._call("POST", path, query, Body(data), {"Content-Type": BYTES})
        else:  # emulators take a request without a body for one that is cut off
            head = f"--x\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': name})}\r\n"
            body = f"{head}--x\r\nContent-Type: {BYTES}\r\n\r\n\r\n--x--".encode()
            headers = {"Content-Type": "multipart/related; boundary=x"}
            answer = await self._call("POST", path, {"uploadType": "multipart", "fields": "crc32c"}, body, headers)
        sent = base64.b64encode(google_crc32c.value(bytes(data)).to_bytes(4, "big")).decode()
        arrived = json.loads(answer).get("crc32c")
        if arrived is not None and arrived != sent:
            raise Refused(0, "the bytes were damaged on their way", damaged=True)

    async def _compose(self, sources: builtins.list[str], target: str) -> None:
        path = f"/storage/v1/b/{self._bucket}/o/{_quoted(target)}/compose"
        what = {"sourceObjects": [{"name": name} for name in sources], "destination": {}}
        body, headers = json.dumps(what).encode(), {"Content-Type": "application/json"}
        await self._call("POST", path, {"fields": "name"}, body, headers)

    async def _remove(self, key: str) -> None:
        try:
            await self._call("DELETE", f"/storage/v1/b/{self._bucket}/o/{_quoted(self._base + key)}")
        except Refused as e:
            if e.status != 404 or e.is_of_bucket:
                raise

    async def _pages(self, query: dict[str, str]) -> builtins.list[dict[str, Any]]:
        pages: builtins.list[dict[str, Any]] = []
        while not pages or pages[-1].get("nextPageToken"):
            more = {"pageToken": pages[-1]["nextPageToken"]} if pages else {}
            pages.append(json.loads(await self._call("GET", f"/storage/v1/b/{self._bucket}/o", {**query, **more})))
        return pages

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        data: Any = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """One request; returns the response's body.

        Raises:
            Refused: the server said no.
        """
        import aiohttp
        from yarl import URL

        file_system = await self._connected()
        session = await file_system._set_session()
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in (query or {}).items())
        url = URL(f"{file_system._location.rstrip('/')}{path}" + (f"?{text}" if text else ""), encoded=True)
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE)
        wanted = file_system._get_headers({**(headers or {}), "Accept-Encoding": "identity"})
        async with session.request(method, url, data=data, headers=wanted, timeout=timeout) as response:
            body: bytes = await response.read()
            if response.status >= 300:
                raise Refused.of(response.status, body, response.headers.get("Retry-After"))
            return body

    async def _connected(self) -> Any:
        """gcsfs, which looks for credentials when it is made."""
        async with self._connecting:
            if self._file_system is None:
                self._file_system = await asyncio.to_thread(self._make)
        return self._file_system

    def _make(self) -> Any:
        endpoint = self._endpoint or self._gcsfs._location()
        anonymous = endpoint.startswith("http://") if self._anonymous is None else self._anonymous
        return self._gcsfs.GCSFileSystem(
            token="anon" if anonymous else None,
            endpoint_url=self._endpoint,
            asynchronous=True,
            skip_instance_cache=True,
        )


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _seconds(text: str | None) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0


async def _all(calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    """Make calls, :data:`CONCURRENCY` at a time; the first error stops the rest and is raised."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    tasks = [asyncio.ensure_future(work()) for _ in range(min(CONCURRENCY, len(calls)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
