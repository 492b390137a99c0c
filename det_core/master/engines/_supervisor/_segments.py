"""The log of an allocation on disk, and its writer; imports the standard library only.

Below the allocation's folder, ``log/`` has the segments of one log per node and writer::

    log/NODE.WRITER.START

``NODE`` is the rank of the node, 0 on this machine. ``WRITER`` is one of

==============  =======================================================================================
``supervisor``  output of the script, written by the supervisor of the node
``master``      the master's own lines and alerts about the trial, written by the master as node 0
``task``        lines that were sent to ``POST /task/logs``, written by the master as node 0
==============  =======================================================================================

``START`` is the offset of the segment's first byte in its log, in decimal without leading zeros. Offsets count bytes
ever written, so a byte has the same offset for ever, wherever its segment is copied to; the length of a log is the
start of its last segment plus that segment's size. A segment begins and ends between lines, is only ever appended to,
and is begun when the one before it has reached :data:`SEGMENT_BYTES`. Of a log of more than :data:`KEPT_BYTES` on
either side the segments in the middle are deleted; readers see that by the gap between two segments.

A line ends with ``\\n``; a last line without one is still being written. Its form is ``TIME KIND REST``:

=================  ====================================================================================
``TIME``           when it was written, in seconds since the epoch, with six decimals; never decreases
``KIND``           ``o`` for stdout and ``e`` for stderr: ``REST`` is the bytes that the script wrote;
                   ``j``: ``REST`` is a JSON object with the fields of the line (writers but supervisor)
=================  ====================================================================================

What does not have this form is ignored by readers: a script can write to these files, too.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

LOG = "log"
"""Name of the directory in the folder of an allocation."""
WRITERS = ("supervisor", "master", "task")
SEGMENT_BYTES = 64 << 20
KEPT_BYTES = 512 << 20
"""Bytes of a log that stay at its beginning, and at its end."""
_NAME = re.compile(r"([0-9]{1,5})\.(supervisor|master|task)\.(0|[1-9][0-9]{0,17})")


def segment_name(node: int, writer: str, start: int) -> str:
    """Return the name of a segment."""
    return f"{node}.{writer}.{start}"


def find_segments(directory: str) -> dict[tuple[int, str], list[int]]:
    """Return the starts of the segments in a ``log`` directory, in order, by node and writer."""
    found: dict[tuple[int, str], list[int]] = {}
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        parts = _NAME.fullmatch(name)
        if parts is not None:
            found.setdefault((int(parts[1]), parts[2]), []).append(int(parts[3]))
    for starts in found.values():
        starts.sort()
    return found


class LogWriter:
    """Appends lines to the log of one node and writer, and deletes its middle. Not thread-safe.

    Args:
        directory: the ``log`` directory; created if need be.
        node: rank of the node.
        writer: one of :data:`WRITERS`.
        segment_bytes: size after which a segment ends.
        kept_bytes: bytes that stay at the beginning, and at the end.
    """

    def __init__(
        self,
        directory: str,
        node: int,
        writer: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._directory = directory
        self._node = node
        self._writer = writer
        self._segment_bytes = segment_bytes
        self._kept_bytes = kept_bytes
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._starts = find_segments(directory).get((node, writer), [0])
        self._fd = self._open(self._starts[-1])
        status = os.fstat(self._fd)
        self._size = status.st_size
        self._last_time = status.st_mtime if self._size else 0.0
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":  # torn by a kill
            self.write(b"\n")

    def stamp(self) -> bytes:
        """Return the time of a line that is written now; a clock that is set back stands still here."""
        self._last_time = max(self._last_time, time.time())
        return b"%.6f" % self._last_time

    def write(self, data: bytes) -> int:
        """Append bytes; return how many of them, as the disk takes them.

        Raises:
            OSError: If the disk takes none.
        """
        count = os.write(self._fd, data)
        self._size += count
        return count

    def append(self, data: bytes) -> None:
        """Append whole lines, all or none, and end the segment if it is full.

        Raises:
            OSError: If the disk does not take all of them.
        """
        before = self._size
        try:
            while data:
                data = data[self.write(data) :]
            self.end_segment_if_full()
        except OSError:
            if data:
                os.ftruncate(self._fd, before)
                self._size = before
                raise

    def end_segment_if_full(self) -> None:
        """Begin another segment if this one is full, and delete those in the middle; to be called between lines.

        Raises:
            OSError: If the segment cannot be created; this one then goes on.
        """
        if self._size < self._segment_bytes:
            return
        start = self._starts[-1] + self._size
        fd = self._open(start)
        os.close(self._fd)
        self._fd = fd
        self._size = 0
        self._starts.append(start)
        self._delete_middle(start)

    def close(self, *, sync: bool = False) -> None:
        """Close the file; with ``sync`` make the segment durable before, as far as the disk does that."""
        if sync:
            with suppress(OSError):
                os.fsync(self._fd)
        os.close(self._fd)

    def _open(self, start: int) -> int:
        path = os.path.join(self._directory, segment_name(self._node, self._writer, start))
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _delete_middle(self, length: int) -> None:
        """Delete the segments that are neither among the first bytes nor, with the new segment, among the last."""
        newest = length - self._kept_bytes + self._segment_bytes
        for start, end in list(zip(self._starts, self._starts[1:], strict=False)):
            if start >= self._kept_bytes and end <= newest:
                self._starts.remove(start)
                with suppress(OSError):
                    os.unlink(os.path.join(self._directory, segment_name(self._node, self._writer, start)))
