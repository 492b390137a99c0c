"""One process's journal on disk: a single append-only file that outlives full disks, deletion and a moved folder.

Every report ends here. What the file promises to the journal above it:

1. :meth:`JournalFile.append` never raises for a disk that refuses, and waits for nothing but the write itself;
   once a second it looks whether the file was deleted or moved, and writes it again, or truncated, and says so.
2. A line is in the file, or waits in memory for it, or is counted by :meth:`JournalFile.close`.
3. The bytes of the file are the order in which lines were appended. Readers and the shipper's cursor lean on that,
   which is why there is never a second file, but for the last words of a run whose disk stays full.

A write that fails puts the file in trouble: its line and all that follow wait in memory until the same path can be
opened and written again. The caller of every method but :meth:`JournalFile.sync` holds the journal's lock.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path

from det_core import _clock
from det_core._standalone.files import write_atomic
from det_core.journal._run_folder import INFO_FILE

logger = logging.getLogger("det_core")

BACKLOG_LIMIT = 64 * 2**20
"""Bytes of lines that wait in memory at most."""
RECORD_BACKLOG_LIMIT = 2**20
"""Bytes beyond that for what is no row of a series: how the run ended, which checkpoints it has."""
RESERVE_BYTES = 64 * 2**10
"""Bytes that are taken from the disk at the start, for such records where the disk stays full to the end."""
RETRY_INTERVAL = 1.0
"""Seconds between two attempts to write after a failure."""
DELETION_CHECK_INTERVAL = 1.0
"""Seconds between two looks at the file's link count."""
READ_BYTES = 2**20
METRICS_PREFIX = b'{"kind":"metrics"'


class JournalFile:
    """Appends lines to ``path``, whatever happens to the disk meanwhile.

    Args:
        path: the file. It is made, with its folder, when the first line is appended.
        header: first line of a new file, newline included.

    Attributes:
        problem: what the disk said last; empty if it never refused.
        is_truncated: whether another process has cut off lines that had been written.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.problem = ""
        self.is_truncated = False
        self._path = path
        self._header = header
        self._header_written = False
        self._reserve = path.with_suffix(".reserve")
        self._fd = -1
        self._size = 0  # of the file, by what was written
        self._is_traceable = False
        self._needs_recovery = True  # not open yet, or lines wait in memory, or the last line may be torn
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._dropped = 0
        self._retry_at = 0.0
        self._look_from = self._look_until = 0.0
        self._run_json = b""

    def append(self, line: bytes, now: float) -> None:
        """Write one line, or keep it for later.

        Args:
            line: newline included.
            now: wall time in seconds. The record carries it anyway, and a second clock call would be a tenth of what
                a report costs.
        """
        if self._needs_recovery:
            self._keep(line)
            if _clock.monotonic() >= self._retry_at:
                self._recover()
            return
        try:
            done = os.write(self._fd, line)
        except OSError as e:
            self._fail(e)
            self._keep(line)
            return
        except BaseException:  # a signal handler raised: what follows must not be glued to half a line
            self._needs_recovery = True
            raise
        if done != len(line):
            self._size += done
            self._fail(_short_write())
            if done < len(line) - 1:  # readers find a line that lacks but its newline, which is the next byte written
                self._keep(line)
            return
        self._size += done
        # By the wall clock, which may be set back: hence a window on both sides.
        if not self._look_from <= now < self._look_until:
            self._look_from, self._look_until = now - DELETION_CHECK_INTERVAL, now + DELETION_CHECK_INTERVAL
            if self._is_damaged():
                self._recover()

    def write_backlog(self) -> None:
        """Write all that waits, as far as the disk takes it now. Does not raise."""
        if self._needs_recovery or self._is_damaged():
            self._recover()

    def duplicate(self) -> int | None:
        """A descriptor of its own for :meth:`sync`; None: there is nothing to sync."""
        try:
            return os.dup(self._fd) if self._fd >= 0 else None
        except OSError as e:
            self._set_problem(e)
            return None

    def sync(self, fd: int) -> None:
        """Force the file and its folder to the disk, and close ``fd``. Does not raise.

        To be called without the journal's lock: it may take seconds, for which no report is to wait.
        """
        try:
            os.fsync(fd)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as e:
            self._set_problem(e)
        finally:
            self._close(fd)

    def count_lost(self) -> int:
        """How many lines are in no file with a name."""
        return self._dropped + len(self._backlog) + (_lines_in(self._fd) if self._is_deleted() else 0)

    def close(self) -> int:
        """Write and sync what can be, and close.

        What is no row of a series and still waits goes into the reserve, the last of it first.

        Returns:
            How many lines are lost.
        """
        self.write_backlog()
        if (fd := self.duplicate()) is not None:
            self.sync(fd)
        if self._backlog:
            self._use_reserve()
        else:
            self._unlink(self._reserve)
        lost = self.count_lost()
        self.close_in_child()
        return lost

    def close_in_child(self) -> None:
        """Close the descriptor and forget what is in memory (in a forked child: the parent's)."""
        if self._fd >= 0:
            self._close(self._fd)
        self._fd, self._needs_recovery = -1, True
        self._backlog.clear()

    def _keep(self, line: bytes) -> None:
        limit = BACKLOG_LIMIT if line.startswith(METRICS_PREFIX) else BACKLOG_LIMIT + RECORD_BACKLOG_LIMIT
        if self._backlog_bytes + len(line) > limit:
            self._dropped += 1
            return
        self._backlog.append(line)
        self._backlog_bytes += len(line)

    def _fail(self, error: OSError) -> None:
        self._needs_recovery = True
        self._retry_at = _clock.monotonic() + RETRY_INTERVAL
        self._set_problem(error)

    def _set_problem(self, error: OSError) -> None:
        if not self.problem:
            logger.warning(
                "the journal in %s cannot be written (%s). Training goes on; reports are kept in memory, up to %d MB, "
                "and written when that is possible again.",
                self._path.parent, error.strerror or error, BACKLOG_LIMIT // 2**20,
            )  # fmt: skip
        self.problem = error.strerror or str(error)

    def _recover(self) -> None:
        """Open the file again, by its path or from what is left of it, and write what waits."""
        self._needs_recovery = True  # until all is known to be whole
        try:
            if self._fd >= 0 and (_link_count(self._fd) == 0 or self._is_moved()):
                self._restore()
            else:
                self._open()
            while self._backlog:
                size = len(self._backlog[0])
                done = os.write(self._fd, self._backlog[0])
                self._size += done
                if done >= size - 1:
                    self._backlog.popleft()
                    self._backlog_bytes -= size
                if done != size:
                    raise _short_write()
        except OSError as e:
            self._fail(e)
        else:
            self._needs_recovery = False

    def _open(self) -> None:
        """Open the path. By path also after trouble: a handle may be stale where the file is not (NFS)."""
        os.makedirs(self._path.parent, exist_ok=True)
        # O_NONBLOCK: a pipe in the file's place must not make anybody wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o666)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EEXIST, "something that is no file is in its place")
            if found.st_size < self._size:
                self._note_truncation(found.st_size)
            # The last write may have left half a line. A newline ends it; readers skip what is torn, and pass over
            # empty lines.
            head = b"\n" if found.st_size else b""
            if not found.st_size or not self._header_written:
                head += self._header
            _write(fd, head)
        except BaseException:
            self._close(fd)
            raise
        self._replace(fd, found.st_size + len(head))

    def _restore(self) -> None:
        """Write a file that was deleted or moved again: its bytes are still behind the open descriptor.

        It gets its name when it is whole, byte by byte as it was: a cursor may stand in it, and half a copy would
        hide the rest.
        """
        moved_to = "" if _link_count(self._fd) == 0 else os.readlink(f"/proc/self/fd/{self._fd}")
        os.makedirs(self._path.parent, exist_ok=True)
        aside = self._path.with_suffix(".restored")
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            position = 0
            while position < os.fstat(self._fd).st_size:
                chunk = os.pread(self._fd, READ_BYTES, position)
                if not chunk:
                    raise OSError(errno.EIO, "the deleted journal file cannot be read back")
                _write(fd, chunk)
                position += len(chunk)
            _write(fd, b"\n")
            os.rename(aside, self._path)
        except BaseException:
            self._close(fd)
            self._unlink(aside)
            raise
        if moved_to:
            logger.warning(
                "the journal file %s was moved while it was written, to %s; it is there again, with its records. What "
                "else was moved with it stays there", self._path, moved_to,
            )  # fmt: skip
        else:
            logger.warning("the journal file %s was deleted; it is there again, with its records", self._path)
        self._replace(fd, position + 1)
        self._restore_run_json()

    def _replace(self, fd: int, size: int) -> None:
        """Go on with another descriptor of a file that has its header, and that size."""
        if self._fd >= 0:
            self._close(self._fd)
        self._fd, self._header_written = fd, True
        self._size = size
        self._is_traceable = True
        self._is_traceable = not self._is_moved()  # some file systems give a file another inode number each time
        self._make_reserve()
        if not self._run_json:
            with suppress(OSError):
                self._run_json = self._path.with_name(INFO_FILE).read_bytes()

    def _is_damaged(self) -> bool:
        """Return whether the file at the path is not what was written: it was deleted, moved or truncated."""
        if self._is_deleted() or self._is_moved():
            return True
        try:
            size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        except OSError as e:
            self._set_problem(e)
            return False
        return size < self._size

    def _is_moved(self) -> bool:
        """Return whether the path leads to no file or another one, while the open file has a name elsewhere."""
        if self._fd < 0 or not self._is_traceable:
            return False
        try:
            opened = os.fstat(self._fd)
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # such as a server that does not answer: the next look may tell
            return False
        return (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino)

    def _note_truncation(self, size: int) -> None:
        """Warn of it once, and begin what follows with a header."""
        if not self.is_truncated:
            logger.warning(
                "the journal file %s was truncated to %d bytes by another process: reports are lost, and the run will "
                "be recorded as incomplete", self._path, size,
            )  # fmt: skip
        self.is_truncated = True
        self._header_written = False

    def _is_deleted(self) -> bool:
        """Whether the open file has lost its name; where that cannot be known, the next look may tell."""
        try:
            return self._fd >= 0 and _link_count(self._fd) == 0
        except OSError as e:
            self._set_problem(e)
            return False

    def _restore_run_json(self) -> None:
        """Put run.json back where the whole folder was deleted, so that the run keeps its name."""
        path = self._path.with_name(INFO_FILE)
        if not self._run_json or path.exists():
            return
        try:
            write_atomic(path, self._run_json)
        except OSError as e:
            logger.warning("%s was deleted, and cannot be written again: %s", path, e.strerror)

    def _make_reserve(self) -> None:
        """Take room from the disk by filling it: to overwrite it needs none."""
        if self._reserve.exists():
            return
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write(fd, bytes(RESERVE_BYTES))
            finally:
                os.close(fd)
        except OSError as e:
            logger.debug("no room is kept in %s for how the run ends: %s", self._reserve, e)
            self._unlink(self._reserve)

    def _use_reserve(self) -> None:
        """Make a journal file of the reserve: the records that wait and are no rows, as many of the last as it takes.

        It is named as earlier versions named the files they went on in, so that every reader finds it.
        """
        chosen: deque[bytes] = deque()
        room = RESERVE_BYTES - len(self._header)
        for line in reversed(self._backlog):
            if not line.startswith(METRICS_PREFIX) and len(line) <= room:
                chosen.appendleft(line)
                room -= len(line)
        text = self._header + b"".join(chosen)
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write(fd, text)
                os.ftruncate(fd, len(text))
                os.fsync(fd)
            finally:
                os.close(fd)
            stem = self._path.name.partition(".")[0]
            names = (self._path.with_name(f"{stem}.{number}.jsonl") for number in count(1))
            os.rename(self._reserve, next(name for name in names if not name.exists()))
        except OSError as e:
            logger.debug("how the run ended cannot be kept in %s: %s", self._reserve, e)
            self._unlink(self._reserve)
        else:
            written = set(chosen)
            self._backlog = deque(line for line in self._backlog if line not in written)

    def _close(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError as e:  # Linux has released the descriptor all the same
            self._set_problem(e)

    def _unlink(self, path: Path) -> None:
        try:
            os.unlink(path)
        except OSError as e:
            logger.debug("%s stays: %s", path, e)


def _write(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    if os.write(fd, data) != len(data):
        raise _short_write()


def _short_write() -> OSError:
    """A disk that takes only a part is full."""
    return OSError(errno.ENOSPC, "the disk took only part of a line")


def _link_count(fd: int) -> int:
    """How many names the open file has."""
    try:
        return os.fstat(fd).st_nlink
    except OSError as e:
        if e.errno == errno.ESTALE:  # deleted on another machine (NFS): it cannot be read back, and is begun anew
            return 1
        raise


def _lines_in(fd: int) -> int:
    """How many lines follow the header in an open file."""
    lines = position = 0
    try:
        while chunk := os.pread(fd, READ_BYTES, position):
            lines += chunk.count(b"\n")
            position += len(chunk)
    except OSError:
        pass
    return max(lines - 1, 0)
