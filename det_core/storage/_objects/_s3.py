"""S3, and what speaks its protocol (Ceph, MinIO, R2, …), by the client of s3fs.

What is caught on the way: objects of up to 1 MiB (metadata, manifests, small files) go with a Content-MD5, which the
server checks; every part of a larger one is checked by TLS over https, and by nothing but TCP's own checksum over
plain http, where the payload is not signed either. Either way every byte that comes back is compared with the digests
that were taken from the file before it was sent, so damage on the way is found when the checkpoint is read.
Hashing all that is sent a second time would cost more than sending it.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from det_core._optional import require
from det_core.errors import StorageError
from det_core.storage._objects import _s3_errors
from det_core.storage._objects._bucket import Entry, KeyMissing
from det_core.storage._objects._s3_session import new_session

if TYPE_CHECKING:
    from det_core.storage._objects._s3_direct import Direct

PART = 16 << 20
PARTS = 10_000
"""The most that S3 lets one object have."""
CONCURRENCY = 32
MD5_LIMIT = 1 << 20
CONNECT_TIMEOUT, SILENCE = 10.0, 60.0
"""Seconds to make a connection, and in which a server must say something."""


class Upload(NamedTuple):
    """An object that is stored in parts."""

    key: str
    upload_id: str
    size: int | None
    """Of the whole; None if somebody else began it."""


class S3Bucket:
    """A bucket, or a folder of one.

    Args:
        bucket: its name.
        prefix: the folder, without slashes around it; empty: the whole bucket.
        endpoint_url: a server that is not AWS; its buckets are asked for by path.
        access_key: the key's id; None: what the environment, the AWS configuration files or the machine's role say.
        secret_key: the key's secret; None with ``access_key`` None.
        session_token: of temporary keys.
        region: of the bucket; None: as configured, else asked for.
        anonymous: sign nothing, for a public bucket.

    Raises:
        MissingExtra: s3fs is not installed.
    """

    concurrency = CONCURRENCY
    concludes = False

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        region: str | None = None,
        anonymous: bool = False,
    ) -> None:
        s3fs = require("s3fs", extra="s3", purpose="a checkpoint store on S3")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._base = bucket, f"{prefix}/" if prefix else ""
        self._file_system = s3fs.S3FileSystem(
            anon=anonymous,
            key=access_key,
            secret=secret_key,
            token=session_token,
            endpoint_url=endpoint_url,
            client_kwargs={"region_name": region} if region else {},
            config_kwargs=_config(endpoint_url is not None),
            session=new_session(),
            cache_regions=endpoint_url is None and region is None,
            asynchronous=True,
            skip_instance_cache=True,
        )
        self._botocore = require("botocore.exceptions", extra="s3", purpose="a checkpoint store on S3")
        self._keys = (access_key, secret_key, session_token)
        self._anonymous = anonymous
        self._connecting = asyncio.Lock()
        self._client: Any = None
        self._direct: Direct | None = None
        self._retired: builtins.list[Direct] = []
        self._doubtful: set[str] = set()

    async def _s3(self) -> Any:
        """The client, connected to the bucket's region."""
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    await self._connect()
        return self._client

    async def _data_path(self) -> Direct | None:
        """What sends and fetches objects; None: the client must."""
        if self._client is None:
            await self._s3()
        return self._direct

    async def _connect(self) -> None:
        first = await self._file_system.set_session()
        try:
            self._client, self._direct = await self._clients()
        except BaseException:
            await first.close()
            raise

    async def _clients(self) -> tuple[Any, Direct | None]:
        from aiobotocore.credentials import AioCredentials

        from det_core.storage._objects._s3_direct import Direct

        client = await self._file_system.get_s3(self._bucket)
        session = self._file_system.session
        keys = None if self._anonymous else AioCredentials(*self._keys) if self._keys[0] else None
        if not self._anonymous and keys is None and (keys := await session.get_credentials()) is None:
            raise self._botocore.NoCredentialsError
        verify = session.get_config_variable("ca_bundle")
        return client, await Direct.to(client, self._bucket, keys, verify)

    @contextlib.contextmanager
    def _redirect(self) -> Iterator[None]:
        """Leave the block when the server wants a request elsewhere; from then on the client sends them all."""
        from det_core.storage._objects._s3_direct import Redirected

        try:
            yield
        except Redirected:
            if self._direct is not None:
                self._retired.append(self._direct)  # other requests may be on their way
            self._direct = None

    async def close(self) -> None:
        """Give all connections back."""
        client, self._client = self._client, None
        used, self._direct, self._retired = [*self._retired, self._direct], None, []
        for direct in used:
            if direct is not None:
                await direct.close()
        if client is not None:
            first = await self._file_system.set_session()
            for each in {id(client): client, id(first): first}.values():
                await each.close()

    def part_size(self, size: int) -> int:
        """16 MiB, or what it takes to stay below the number of parts that S3 allows."""
        return max(PART, -(-size // PARTS))

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object."""
        name, md5 = self._base + key, _md5(data) if len(data) <= MD5_LIMIT else None
        if (direct := await self._data_path()) is not None:
            with self._redirect():
                await direct.put("PutObject", name, data, {"Content-MD5": md5} if md5 else {}, "")
                return
        extra = {"ContentMD5": md5} if md5 else {}
        await (await self._s3()).put_object(Bucket=self._bucket, Key=name, Body=bytes(data), **extra)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of an object."""
        part = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            if (direct := await self._data_path()) is not None:
                with self._redirect():
                    return await direct.get(self._base + key, part)
            response = await (await self._s3()).get_object(Bucket=self._bucket, Key=self._base + key, **part)
            async with response["Body"] as body:
                data: bytes = await body.read()
                return data
        except self._botocore.ClientError as e:
            code = _s3_errors.code_of(e)
            if code == "NoSuchKey":
                raise KeyMissing(key) from e
            if code == "InvalidRange":
                return b""
            raise

    async def begin_parts(self, key: str, size: int) -> Upload:
        """Begin an object of several parts. One that a failed call may have begun, unheard, is given up first."""
        client = await self._s3()
        if key in self._doubtful:
            for upload in await self.stale_parts(key):
                if upload.key == self._base + key:
                    await self.abort_parts(upload)
        self._doubtful.add(key)
        made = await client.create_multipart_upload(Bucket=self._bucket, Key=self._base + key)
        self._doubtful.discard(key)
        return Upload(self._base + key, made["UploadId"], size)

    async def put_part(self, upload: Upload, number: int, data: bytes | memoryview) -> dict[str, Any]:
        """Store a part."""
        if (direct := await self._data_path()) is not None:
            with self._redirect():
                query = f"partNumber={number}&uploadId={quote(upload.upload_id, safe='')}"
                return {"PartNumber": number, "ETag": await direct.put("UploadPart", upload.key, data, {}, query)}
        found = await (await self._s3()).upload_part(**self._of(upload), PartNumber=number, Body=bytes(data))
        return {"PartNumber": number, "ETag": found["ETag"]}

    async def finish_parts(self, upload: Upload, parts: builtins.list[Any]) -> None:
        """Make the object. One that an earlier call made, whose answer was lost, is no error."""
        client = await self._s3()
        try:
            await client.complete_multipart_upload(**self._of(upload), MultipartUpload={"Parts": parts})
        except self._botocore.ClientError as e:
            if _s3_errors.code_of(e) != "NoSuchUpload" or await self._size(upload.key) != upload.size:
                raise

    async def abort_parts(self, upload: Upload) -> None:
        """Give the parts up."""
        client = await self._s3()
        try:
            await client.abort_multipart_upload(**self._of(upload))
        except self._botocore.ClientError as e:
            if _s3_errors.code_of(e) != "NoSuchUpload":
                raise

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every object under a prefix."""
        start, whole = len(self._base), self._base + prefix
        if (direct := await self._data_path()) is not None:
            with self._redirect():
                return [entry._replace(key=entry.key[start:]) for entry in await direct.list(whole)]
        return [
            Entry(found["Key"][start:], found["Size"], found["LastModified"].timestamp())
            async for page in self._pages("list_objects_v2", Prefix=whole)
            for found in page.get("Contents", ())
        ]

    async def children(self, prefix: str) -> builtins.list[str]:
        """What lies directly in a folder."""
        start = len(self._base + prefix)
        names: set[str] = set()
        async for page in self._pages("list_objects_v2", Prefix=self._base + prefix, Delimiter="/"):
            names.update(found["Prefix"][start:] for found in page.get("CommonPrefixes", ()))
            names.update(found["Key"][start:] for found in page.get("Contents", ()))
        return sorted(names - {""})

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand by one request."""
        client = await self._s3()
        for first in range(0, len(keys), 1000):
            objects = [{"Key": self._base + key} for key in keys[first : first + 1000]]
            what = {"Objects": objects, "Quiet": True}
            answer = await client.delete_objects(Bucket=self._bucket, Delete=what)
            for error in answer.get("Errors", ()):
                if error.get("Code") != "NoSuchKey":
                    raise self._botocore.ClientError({"Error": error}, "DeleteObjects")

    async def stale_parts(self, prefix: str) -> builtins.list[Upload]:
        """What was begun under a prefix and never finished."""
        return [
            Upload(found["Key"], found["UploadId"], None)
            async for page in self._pages("list_multipart_uploads", Prefix=self._base + prefix)
            for found in page.get("Uploads", ())
        ]

    def retryable(self, error: Exception) -> bool:
        """Throttled, overloaded, or the connection failed."""
        return _s3_errors.is_passing(error)

    def retry_after(self, error: Exception) -> float | None:
        """The seconds that the server asked for."""
        return _s3_errors.retry_after(error)

    def explain(self, operation: str, key: str, error: Exception) -> StorageError:
        """One line for what was refused."""
        endpoint = self._file_system.endpoint_url
        return _s3_errors.explain(self.url, self._bucket, endpoint, operation, key, error)

    async def _pages(self, operation: str, **options: str) -> Any:
        client = await self._s3()
        async for page in client.get_paginator(operation).paginate(Bucket=self._bucket, **options):
            yield page

    async def _size(self, key: str) -> int | None:
        client = await self._s3()
        try:
            found = await client.head_object(Bucket=self._bucket, Key=key)
        except self._botocore.ClientError:
            return None
        size: int = found["ContentLength"]
        return size

    def _of(self, upload: Upload) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": upload.key, "UploadId": upload.upload_id}


def _md5(data: bytes | memoryview) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _config(by_path: bool) -> dict[str, Any]:
    """How the client is to behave: no retries, as the door does them, and no hashing of what is hashed before."""
    return {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": SILENCE,
        "max_pool_connections": CONCURRENCY + 4,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "signature_version": "s3v4",
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False, "addressing_style": "path" if by_path else "auto"},
    }
