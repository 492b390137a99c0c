"""Any file system of fsspec as a bucket: by its coroutines where it has them, else by threads."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import datetime
import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from det_core.errors import StorageError
from det_core.storage._objects._bucket import Entry, KeyMissing
from det_core.storage._objects._sequential import SequentialFile, outlasting

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
PART = 16 << 20
CONCURRENCY = 8
KEYS = 100
"""Deleted by one thread at a time."""
PASSING = {
    errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY,
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EINTR,
}  # fmt: skip
STATUSES = (408, 425, 429, 500, 502, 503, 504)
MODIFIED = ("modified", "mtime", "last_modified", "LastModified", "updated", "created")
"""What file systems call it."""
WITH_FOLDERS = ("file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs")
"""Protocols of file systems that keep folders when they are empty."""


class FsspecBucket:
    """Keys below a path of a file system of fsspec.

    Args:
        url: protocol, path, and no secret.
        kind: the file system's class.
        path: the root, as the class writes it.
        options: what the class is made with.
        secrets: texts that no message may show.
    """

    concurrency = CONCURRENCY

    def __init__(
        self,
        url: str,
        kind: type[AbstractFileSystem],
        path: str,
        options: Mapping[str, Any],
        secrets: Iterable[str] = (),
    ) -> None:
        self.url = url
        self.concludes = not kind.async_impl  # what a thread does is waited for
        self._kind, self._options = kind, dict(options)
        self._base = path.rstrip("/") + "/"
        self._secrets = [secret for secret in secrets if secret]
        protocols = (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)
        self._keeps_folders = any(name in WITH_FOLDERS for name in protocols)
        self._each_thread = threading.local()
        self._threads: ThreadPoolExecutor | None = None

    def part_size(self, size: int) -> int:
        """One size, as parts are written one after the other."""
        return PART

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a file; folders above it that are missing are made."""
        path = self._base + key
        try:
            await self._call("pipe_file", path, bytes(data))
        except FileNotFoundError:
            await self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
            await self._call("pipe_file", path, bytes(data))

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a part of a file."""
        part = {} if start == 0 and end is None else {"start": start, "end": end}
        try:
            return bytes(await self._call("cat_file", self._base + key, **part))
        except FileNotFoundError as e:
            raise KeyMissing(key) from e

    async def begin_parts(self, key: str, size: int) -> SequentialFile:
        """Open a file that is written block by block."""
        path = self._base + key
        file = SequentialFile(self._file_system, path)
        try:
            try:
                await file.open()
            except FileNotFoundError:
                await self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
                await file.open()
        except BaseException:
            file.forget()
            raise
        return file

    async def put_part(self, upload: SequentialFile, number: int, data: bytes | memoryview) -> None:
        """Write a block, when those before it are written."""
        await upload.write(number, data)

    async def finish_parts(self, upload: SequentialFile, parts: builtins.list[Any]) -> None:
        """Close the file."""
        await upload.finish()

    async def abort_parts(self, upload: SequentialFile) -> None:
        """Throw the file away."""
        await upload.abort()

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every file below the last folder of the prefix whose key begins with it."""
        folder = prefix.rpartition("/")[0]
        options = {"on_error": "raise"} if self._walks() else {}
        try:
            await self._forget()
            found = await self._call("find", self._base + folder, detail=True, **options)
        except FileNotFoundError:
            return []
        entries = [
            Entry(self._key(path), info.get("size") or 0, _modified(info))
            for path, info in found.items()
            if info.get("type") != "directory"
        ]
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    async def children(self, prefix: str) -> builtins.list[str]:
        """What lies directly in a folder."""
        try:
            await self._forget()
            found = await self._call("ls", self._base + prefix.rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = set()
        for info in found:
            key = self._key(info["name"]).removeprefix(prefix)
            if key and key + "/" != prefix:
                names.add(key.rstrip("/") + ("/" if info["type"] == "directory" else ""))
        return sorted(names)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove files, and the folders that are empty then, where the file system keeps such."""
        paths = [self._base + key for key in keys]
        if self._kind.async_impl:
            for first in range(0, len(paths), CONCURRENCY):
                await asyncio.gather(*(self._remove(path) for path in paths[first : first + CONCURRENCY]))
        else:
            for first in range(0, len(paths), KEYS):
                await self._in_thread(self._remove_all, paths[first : first + KEYS])
        if self._keeps_folders:
            folders = {folder for key in keys for folder in _above(key)}
            await self._in_thread(self._remove_folders, sorted(folders, key=len, reverse=True))

    async def stale_parts(self, prefix: str) -> builtins.list[Any]:
        """A file that was not finished lies under its key, and is seen as any other."""
        return []

    async def close(self) -> None:
        """Let the threads go."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def retryable(self, error: Exception) -> bool:
        """By errno, or by the status of the HTTP answer that the error carries."""
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        return isinstance(error, ConnectionError) or _status(error) in STATUSES

    def retry_after(self, error: Exception) -> float | None:
        """From the headers that the error carries, if any."""
        headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
        try:
            return float(headers["Retry-After"]) if headers and "Retry-After" in headers else None
        except (TypeError, ValueError):
            return None

    def explain(self, operation: str, key: str, error: Exception) -> StorageError:
        """What the driver says, without secrets."""
        number = error.errno if isinstance(error, OSError) and error.errno else _number(error)
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join((told or "no reason was given").split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return StorageError(
            number, f"checkpoint store {self.url}: cannot {operation} {key}: {type(error).__name__}: {text}"
        )

    # How the file system is called.

    def _file_system(self) -> AbstractFileSystem:
        """An instance of this thread alone, as few file systems may be shared. A coroutine may be: of the loop's."""
        found = getattr(self._each_thread, "file_system", None)
        if found is None:
            found = self._kind(**self._options, skip_instance_cache=True, use_listings_cache=False)
            self._each_thread.file_system = found
        return found

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if self._kind.async_impl and asyncio.iscoroutinefunction(getattr(self._kind, f"_{name}", None)):
            return await getattr(self._file_system(), f"_{name}")(*args, **options)
        return await self._in_thread(lambda: getattr(self._file_system(), name)(*args, **options))

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="det_core-fsspec")
        return await outlasting(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))

    async def _forget(self) -> None:
        """Have a listing be of now."""
        if self._kind.async_impl:
            self._file_system().invalidate_cache()
        else:
            await self._in_thread(lambda: self._file_system().invalidate_cache())

    def _walks(self) -> bool:
        """Whether its find() is fsspec's own, which passes over folders that cannot be read unless it is told."""
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        if self._kind.async_impl:
            return getattr(self._kind, "_find", None) is AsyncFileSystem._find
        return self._kind.find is AbstractFileSystem.find

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._call("rm_file", path)

    def _remove_all(self, paths: Sequence[str]) -> None:
        file_system = self._file_system()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                file_system.rm_file(path)

    def _remove_folders(self, folders: Sequence[str]) -> None:
        for folder in folders:
            with contextlib.suppress(Exception):  # one that is not empty stays, by whatever error
                self._file_system().rmdir(self._base + folder)

    def _key(self, path: str) -> str:
        return path[len(self._base) :] if path.startswith(self._base) else ("/" + path)[len(self._base) :]


def _above(key: str) -> list[str]:
    parts = key.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _modified(info: Mapping[str, Any]) -> float:
    for name in MODIFIED:
        found = info.get(name)
        if isinstance(found, datetime.datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    return 0.0


def _status(error: Exception) -> object:
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return found
    return None


def _number(error: Exception) -> int:
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return errno.EACCES
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return errno.ENOENT
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return errno.ETIMEDOUT
    return errno.EIO
