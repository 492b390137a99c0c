"""One process's journal on disk: a single append-only file that survives full disks, deletion and a moved directory.

Every report ends here. The file guarantees to the journal above it:

1. :meth:`JournalFile.append` never raises for a disk that refuses, and waits for nothing but the write itself. Once a
   second it checks the file: one that was deleted or moved is written again, one that was truncated is reported.
2. A line is in the file, or waits in memory for it, or is counted by :meth:`JournalFile.close`.
3. The bytes of the file are the order in which lines were appended. Readers and cursors rely on that, so there is no
   second file, except for the final records of a run whose disk stays full.

After a failed write the file needs recovery: its line and all later ones wait in memory until the same path can be
opened and written again. Callers hold the journal's lock, except for :meth:`JournalFile.sync`.
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
"""Maximum bytes of lines that wait in memory."""
RECORD_BACKLOG_LIMIT = 2**20
"""Bytes beyond that for records that are not metrics: the outcome of the run, its checkpoints."""
RESERVE_BYTES = 64 * 2**10
"""Bytes that are allocated on disk at the start, for such records if the disk stays full to the end."""
RETRY_INTERVAL = 1.0
"""Seconds between two attempts to write after a failure."""
DELETION_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the file's link count, inode and size."""
READ_BYTES = 2**20
"""Bytes that are read at a time from a file that is restored."""
METRICS_PREFIX = b'{"kind":"metrics"'
"""Beginning of the line of a metrics row."""


class JournalFile:
    """Append lines to ``path``, whatever happens to the disk meanwhile.

    Args:
        path: the file. It is created, with its directory, when the first line is appended.
        header: first line of a new file, newline included.

    Attributes:
        problem: the last error of the disk; empty if there was none.
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
        self._size = 0  # by the bytes written: a smaller file has been truncated
        self._is_traceable = False
        self._needs_recovery = True  # not open yet, or lines wait in memory, or the last line may be torn
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._dropped = 0
        self._retry_at = 0.0
        self._check_from = 0.0
        self._check_until = 0.0
        self._run_json = b""

    def append(self, line: bytes, now: float) -> None:
        """Write one line, or keep it for later.

        Args:
            line: the line, newline included.
            now: wall time in seconds. The record has it anyway, and a second clock call would cost a tenth of a report.
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
            # A line that lacks only its newline is complete to readers: recovery writes a newline first.
            if done < len(line) - 1:
                self._keep(line)
            return
        self._size += done
        # The wall clock may be set back, so the window has two sides.
        if not self._check_from <= now < self._check_until:
            self._check_from = now - DELETION_CHECK_INTERVAL
            self._check_until = now + DELETION_CHECK_INTERVAL
            if self._is_damaged():
                self._recover()

    def write_backlog(self) -> None:
        """Write all pending lines that the disk takes now. Does not raise."""
        if self._needs_recovery or self._is_damaged():
            self._recover()

    def duplicate(self) -> int | None:
        """Return a duplicate of the descriptor for :meth:`sync`, or None if there is nothing to sync."""
        if self._fd < 0:
            return None
        try:
            return os.dup(self._fd)
        except OSError as e:
            self._set_problem(e)
            return None

    def sync(self, fd: int) -> None:
        """Force the file and its directory to the disk, and close ``fd``. Does not raise.

        Call it without the journal's lock: it may take seconds, and reports must not wait for it.
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
        """Return the number of lines that are in no file with a name."""
        lost = self._dropped + len(self._backlog)
        if self._is_deleted():
            lost += _lines_in(self._fd)
        return lost

    def close(self) -> int:
        """Write and sync all that the disk takes, and close.

        Pending records that are not metrics go into the reserve, the newest first.

        Returns:
            The number of lost lines.
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
        """Close the descriptor and drop the backlog, both of which belong to the parent."""
        if self._fd >= 0:
            self._close(self._fd)
        self._fd = -1
        self._needs_recovery = True
        self._backlog.clear()

    def _keep(self, line: bytes) -> None:
        limit = BACKLOG_LIMIT
        if not line.startswith(METRICS_PREFIX):
            limit += RECORD_BACKLOG_LIMIT
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
                "cannot write the journal in %s (%s): keeping up to %d MB of reports in memory, and retrying",
                self._path.parent, error.strerror or error, BACKLOG_LIMIT // 2**20,
            )  # fmt: skip
        self.problem = error.strerror or str(error)

    def _recover(self) -> None:
        """Open the file again, by its path or from what is left of it, and write the backlog."""
        self._needs_recovery = True  # also if a signal handler raises in the middle
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
        """Open the path, and end a half-written line."""
        # By its path even if it is open: after a failure on NFS a handle may be stale while the file is not.
        os.makedirs(self._path.parent, exist_ok=True)
        # O_NONBLOCK: a pipe in the file's place must not block a report.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o666)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EEXIST, "not a regular file")
            if found.st_size < self._size:
                self._note_truncation(found.st_size)
            # The last write may have left half a line. A newline ends it; readers skip torn and empty lines.
            head = b""
            if found.st_size:
                head = b"\n"
            if not found.st_size or not self._header_written:
                head += self._header
            _write(fd, head)
        except BaseException:
            self._close(fd)
            raise
        self._replace(fd, found.st_size + len(head))

    def _restore(self) -> None:
        """Write a file that was deleted or moved again, from the bytes behind the open descriptor."""
        # Byte by byte, as a cursor may point into it, and under another name until it is complete, as half a copy would
        # hide the rest.
        moved_to = ""
        if _link_count(self._fd):
            moved_to = os.readlink(f"/proc/self/fd/{self._fd}")
        os.makedirs(self._path.parent, exist_ok=True)
        staging = self._path.with_suffix(".restored")
        fd = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            position = 0
            while position < os.fstat(self._fd).st_size:
                chunk = os.pread(self._fd, READ_BYTES, position)
                if not chunk:
                    raise OSError(errno.EIO, "cannot read the deleted journal file back")
                _write(fd, chunk)
                position += len(chunk)
            _write(fd, b"\n")
            os.rename(staging, self._path)
        except BaseException:
            self._close(fd)
            self._unlink(staging)
            raise
        if moved_to:
            logger.warning(
                "restored journal file %s, which was moved to %s while it was written; anything else that was moved "
                "with it stays there", self._path, moved_to,
            )  # fmt: skip
        else:
            logger.warning("restored deleted journal file %s", self._path)
        self._replace(fd, position + 1)
        self._restore_run_json()

    def _replace(self, fd: int, size: int) -> None:
        """Continue with another descriptor, of a file of that size that has its header."""
        if self._fd >= 0:
            self._close(self._fd)
        self._fd = fd
        self._header_written = True
        self._size = size
        self._is_traceable = True
        # Some file systems give a file another inode number at each stat(): moves cannot be detected there.
        self._is_traceable = not self._is_moved()
        self._make_reserve()
        if not self._run_json:
            with suppress(OSError):
                self._run_json = self._path.with_name(INFO_FILE).read_bytes()

    def _is_damaged(self) -> bool:
        """Return whether the file at the path is not what was written: deleted, moved or truncated."""
        if self._is_deleted() or self._is_moved():
            return True
        if self._fd < 0:
            return self._size > 0
        try:
            return os.fstat(self._fd).st_size < self._size
        except OSError as e:
            self._set_problem(e)
            return False

    def _is_moved(self) -> bool:
        """Return whether the path leads to another file or to none, while the open file has a name elsewhere."""
        if self._fd < 0 or not self._is_traceable:
            return False
        try:
            opened = os.fstat(self._fd)
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # such as a server that does not answer: the next check may know
            return False
        return (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino)

    def _note_truncation(self, size: int) -> None:
        """Warn of a truncation once, and let the next line follow a header."""
        if not self.is_truncated:
            logger.warning(
                "journal file %s was truncated to %d bytes by another process: reports are lost, and the run will be "
                "recorded as incomplete", self._path, size,
            )  # fmt: skip
        self.is_truncated = True
        self._header_written = False

    def _is_deleted(self) -> bool:
        """Return whether the open file has lost its name; False if that cannot be known, until the next check."""
        try:
            return self._fd >= 0 and _link_count(self._fd) == 0
        except OSError as e:
            self._set_problem(e)
            return False

    def _restore_run_json(self) -> None:
        """Put run.json back if the whole directory was deleted, so that the run keeps its name."""
        path = self._path.with_name(INFO_FILE)
        if not self._run_json or path.exists():
            return
        try:
            write_atomic(path, self._run_json)
        except OSError as e:
            logger.warning("cannot restore deleted %s: %s", path, e.strerror)

    def _make_reserve(self) -> None:
        """Allocate room on the disk by filling it: overwriting it later needs none."""
        if self._reserve.exists():
            return
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write(fd, bytes(RESERVE_BYTES))
            finally:
                os.close(fd)
        except OSError as e:
            logger.debug("cannot reserve room for the outcome of the run in %s: %s", self._reserve, e)
            self._unlink(self._reserve)

    def _use_reserve(self) -> None:
        """Make a journal file of the reserve, with the newest pending records that fit and are not metrics."""
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
            # The name of a further file of a process, as earlier versions wrote them: all readers know it.
            stem = self._path.name.partition(".")[0]
            names = (self._path.with_name(f"{stem}.{number}.jsonl") for number in count(1))
            os.rename(self._reserve, next(name for name in names if not name.exists()))
        except OSError as e:
            logger.debug("cannot write the outcome of the run to %s: %s", self._reserve, e)
            self._unlink(self._reserve)
        else:
            written = set(chosen)
            self._backlog = deque(line for line in self._backlog if line not in written)

    def _close(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError as e:  # Linux has released the descriptor even so
            self._set_problem(e)

    def _unlink(self, path: Path) -> None:
        try:
            os.unlink(path)
        except OSError as e:
            logger.debug("cannot remove %s: %s", path, e)


def _write(fd: int, data: bytes) -> None:
    """Write all of ``data`` in one call."""
    if os.write(fd, data) != len(data):
        raise _short_write()


def _short_write() -> OSError:
    """Return the error of a disk that takes only a part: it is full."""
    return OSError(errno.ENOSPC, "the disk took only part of a line")


def _link_count(fd: int) -> int:
    """Return the number of names that the open file has."""
    try:
        return os.fstat(fd).st_nlink
    except OSError as e:
        if e.errno == errno.ESTALE:  # deleted on another machine (NFS): it cannot be read back, so begin a new one
            return 1
        raise


def _lines_in(fd: int) -> int:
    """Return the number of lines after the header of an open file."""
    lines = position = 0
    try:
        while chunk := os.pread(fd, READ_BYTES, position):
            lines += chunk.count(b"\n")
            position += len(chunk)
    except OSError:
        pass
    return max(lines - 1, 0)
