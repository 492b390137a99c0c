"""A request's body as aiohttp takes one: sent from the caller's own buffer, in slices, copying what a socket leaves."""

from __future__ import annotations

from typing import Any

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

SLICE = 256 << 10
"""Bytes handed to the socket at a time: what it does not take at once is copied."""


class Body(Payload):  # type: ignore[misc]
    """Bytes to send. botocore takes it for a file, aiohttp for what it is; both may send it again.

    Args:
        data: what to send; not to be changed before it is sent.
    """

    _autoclose = True

    def __init__(self, data: bytes | memoryview) -> None:
        super().__init__(data)
        self._view = memoryview(data)
        self._size = len(self._view)
        self._at = 0

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Called by aiohttp."""
        for start in range(0, len(self._view), SLICE):
            await writer.write(self._view[start : start + SLICE])

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Called by aiohttp."""
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The data as text."""
        return str(bytes(self._view), encoding, errors)

    # What botocore asks of a file, to learn its length and to sign or hash it if it has to.

    def read(self, size: int = -1) -> bytes:
        """Called by botocore."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        found = bytes(self._view[self._at : end])
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """Called by botocore."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """Called by botocore."""
        return self._at

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Any:
        return iter((bytes(self._view),))
