"""A file of fsspec that is written block by block, as the parts of an object that come in any order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
PATIENCE = 10.0
"""Seconds that a cancelled call waits for its thread."""


class SequentialFile:
    """One open file and the one thread that may touch it.

    Args:
        file_system: gives the thread its file system.
        path: where the file is.
    """

    def __init__(self, file_system: Callable[[], AbstractFileSystem], path: str) -> None:
        self._file_system, self._path = file_system, path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="det_core-parts")
        self._file: Any = None
        self._next = 1
        self._turn = asyncio.Condition()
        self._over = False

    async def open(self) -> None:
        """Make the file."""
        await self._do(self._open)

    async def write(self, number: int, data: bytes | memoryview) -> None:
        """Write block ``number`` when those before it are there. Again, if it is there, it does nothing.

        Raises:
            OSError: what the file system says. As nobody knows how much was written, no later block is taken.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._next >= number or self._file is None)
            if self._file is None:
                raise OSError(f"{self._path} was given up")
            if self._next > number:
                return
            try:
                await self._do(self._file.write, data)
            except BaseException:
                await self._close()
                raise
            finally:
                self._turn.notify_all()
            self._next = number + 1

    async def finish(self) -> None:
        """Close it, so that it is there. Again, if it is there, it does nothing."""
        if self._over:
            return
        if self._file is None:
            raise OSError(f"{self._path} was given up")
        file, self._file = self._file, None
        await self._do(file.close)
        self._end()

    async def abort(self) -> None:
        """Close it and remove what there is."""
        if self._over:
            return
        await self._close()
        with contextlib.suppress(FileNotFoundError):
            await self._do(lambda: self._file_system().rm_file(self._path))
        self._end()

    def forget(self) -> None:
        """Throw away what was opened, or is being opened, without waiting for it."""
        self._thread.submit(self._drop)
        self._end()

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            _throw_away(file)
            self._file_system().rm_file(self._path)

    def _end(self) -> None:
        self._over = True
        self._thread.shutdown(wait=False)

    async def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await self._do(_throw_away, file)

    def _open(self) -> None:
        self._file = self._file_system().open(self._path, "wb")

    async def _do(self, function: Callable[..., Any], *args: Any) -> None:
        await outlasting(asyncio.get_running_loop().run_in_executor(self._thread, function, *args))


async def outlasting(future: asyncio.Future[T]) -> T:
    """Await what a thread does. As a thread cannot be cancelled, who is cancelled waits a while until it is over.

    Otherwise what it writes might come after the removal of all that was written.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future], timeout=PATIENCE)
        raise


def _throw_away(file: Any) -> None:
    """Close a file without making it an object, if its file system can do that."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        with contextlib.suppress(NotImplementedError, AttributeError):
            file.discard()
        file.closed = True
    else:
        file.close()
