"""The log of an allocation on disk, and its writers; imports the standard library only.

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
from itertools import pairwise

LOG = "log"
"""Name of the directory in the folder of an allocation."""
SEGMENT_BYTES = 64 << 20
KEPT_BYTES = 512 << 20
"""Bytes of a log that stay at its beginning, and at its end."""
MAX_LINE_BYTES = 64 * 1024
"""Bytes after which a line of output goes on in the next one."""
BAR_INTERVAL = 1.0
"""Seconds within which only the last of the lines that a ``\\r`` ends is written: a progress bar draws many."""
_MAX_HELD_BYTES = 16 << 20
_NAME = re.compile(r"([0-9]{1,5})\.(supervisor|master|task)\.(0|[1-9][0-9]{0,17})")
_END = re.compile(rb"\r\n|\n|\r")
_KINDS = {"stdout": b" o ", "stderr": b" e "}


def segment_name(node: int, writer: str, start: int) -> str:
    """Return the name of a segment."""
    return f"{node}.{writer}.{start}"


def find_segments(directory: str) -> dict[tuple[int, str], list[int]]:
    """Return the starts of the segments in a ``log`` directory, in order, by node and writer."""
    found: dict[tuple[int, str], list[int]] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for match in filter(None, map(_NAME.fullmatch, os.listdir(directory))):
            found.setdefault((int(match[1]), match[2]), []).append(int(match[3]))
    for starts in found.values():
        starts.sort()
    return found


def find_middle(starts: list[int], segment_bytes: int = SEGMENT_BYTES, kept_bytes: int = KEPT_BYTES) -> list[int]:
    """Return the starts of segments that neither begin among the first bytes nor end among the last ones.

    Args:
        starts: Starts of all segments; the last one is to get as many bytes as the others.
        segment_bytes, kept_bytes: As for :class:`LogWriter`.
    """
    newest = starts[-1] - kept_bytes + segment_bytes
    return [start for start, end in pairwise(starts) if start >= kept_bytes and end <= newest]


class LogWriter:
    """Appends lines to the log of one node and writer, and deletes its middle. Not thread-safe.

    Args:
        directory: The ``log`` directory; created if need be.
        node: Rank of the node.
        writer: Name of the writer.
        segment_bytes: Size after which a segment ends.
        kept_bytes: Bytes that stay at the beginning, and at the end.
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
        self._key = (node, writer)
        self._segment_bytes = segment_bytes
        self._kept_bytes = kept_bytes
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._starts = find_segments(directory).get(self._key, [0])
        self._fd = self._open(self._starts[-1])
        status = os.fstat(self._fd)
        self._size = status.st_size
        self._last_time = 0.0
        if self._size:
            self._last_time = status.st_mtime
            if os.pread(self._fd, 1, self._size - 1) != b"\n":  # torn by a kill
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
                # Half a line would spoil the next one.
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
        # Before the old one is closed: without room for another file this one goes on.
        fd = self._open(start)
        os.close(self._fd)
        self._fd = fd
        self._size = 0
        self._starts.append(start)
        for middle in find_middle(self._starts, self._segment_bytes, self._kept_bytes):
            self._starts.remove(middle)
            with suppress(OSError):
                os.unlink(self._path(middle))

    def close(self, *, sync: bool = False) -> None:
        """Close the file; with ``sync`` make the segment durable before, as far as the disk does that."""
        if sync:
            with suppress(OSError):
                os.fsync(self._fd)
        os.close(self._fd)

    def _path(self, start: int) -> str:
        return os.path.join(self._directory, segment_name(*self._key, start))

    def _open(self, start: int) -> int:
        return os.open(self._path(start), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class OutputLog:
    """Writes the output of a script to a log, as lines.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r``, and is written once it has ended. While the disk is full the script
    goes on: lines wait, and beyond 16 MB the newest are dropped.

    Args:
        log: Log to write to, which is closed with this one.

    Attributes:
        lost: Bytes that were dropped.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log
        self._streams = {stream: _Lines() for stream in _KINDS}
        self._pending = b""
        self.lost = 0

    def add(self, stream: str, data: bytes, *, final: bool = False) -> None:
        """Take output of ``stdout`` or ``stderr``; ``final`` ends a line that has not ended."""
        self._append(stream, self._streams[stream].split(data, final))
        self.flush()

    def flush(self) -> None:
        """Write the progress bars that are due, and what waits, as far as the disk takes it."""
        for stream, lines in self._streams.items():
            self._append(stream, lines.take_due_bar())
        if not self._pending:
            return
        with suppress(OSError):
            while self._pending:
                self._pending = self._pending[self._log.write(self._pending) :]
            self._log.end_segment_if_full()

    def close(self) -> None:
        """Write what waits, and make it durable."""
        for stream in self._streams:
            self.add(stream, b"", final=True)
        self.lost += len(self._pending)
        self._log.close(sync=True)

    def _append(self, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        head = self._log.stamp() + _KINDS[stream]
        # One stamp for all that was read at once: they have come together.
        data = head + (b"\n" + head).join(lines) + b"\n"
        if len(self._pending) + len(data) > _MAX_HELD_BYTES:
            self.lost += len(data)
        else:
            self._pending += data


class _Lines:
    """Lines of one stream."""

    def __init__(self) -> None:
        self._begun = b""
        self._bar: bytes | None = None
        self._bar_due = 0.0

    def split(self, data: bytes, final: bool) -> list[bytes]:
        """Return the lines that are to be written after this data."""
        data = self._begun + data
        if b"\r" in data or self._bar is not None:
            lines, rest = self._split_bars(data, final)
        else:
            *lines, rest = data.split(b"\n")
        if final and rest:
            lines.append(rest)
            rest = b""
        if len(data) > MAX_LINE_BYTES:
            lines = [piece for line in lines for piece in _cut(line)]
            *pieces, rest = _cut(rest)
            lines += pieces
        self._begun = rest
        return lines

    def take_due_bar(self) -> list[bytes]:
        """Return the last line that a ``\\r`` ended, once its interval is over."""
        if self._bar is None or time.monotonic() < self._bar_due:
            return []
        return self._take_bar()

    def _split_bars(self, data: bytes, final: bool) -> tuple[list[bytes], bytes]:
        """Return the lines that have ended, of those that a ``\\r`` ended one an interval, and what is left."""
        lines: list[bytes] = []
        begin = 0
        for end in _END.finditer(data):
            if end.group() != b"\r":
                lines += self._take_bar()
                lines.append(data[begin : end.start()])
            elif end.end() == len(data) and not final:
                break  # perhaps the half of "\r\n"
            elif end.start() > begin:  # a progress bar begins each line with "\r"
                if self._bar is None:
                    self._bar_due = time.monotonic() + BAR_INTERVAL
                self._bar = data[begin : end.start()]
                lines += self.take_due_bar()
            begin = end.end()
        if final:
            lines += self._take_bar()
        return lines, data[begin:]

    def _take_bar(self) -> list[bytes]:
        if self._bar is None:
            return []
        bar = self._bar
        self._bar = None
        return [bar]


def _cut(line: bytes) -> list[bytes]:
    """Cut a long line into pieces, none of them within a character."""
    pieces = []
    while len(line) > MAX_LINE_BYTES:
        end = MAX_LINE_BYTES
        while end > MAX_LINE_BYTES - 3 and line[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]
