"""The files of one process: appended to, watched, and replaced when they fail.

A write that fails never raises. Its line, and every line after it, is kept in memory (up to ``limit`` bytes)
and written to a new file when a later report, :meth:`Sink.flush` or :meth:`Sink.close` tries again. A file
that somebody deleted is noticed by its link count, and what was in it is read back from the open descriptor
into a new file. Whoever calls holds the journal's lock.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from det_core import _clock
from det_core.errors import ReportsNotKept
from det_core.journal._doors import Doors
from det_core.journal._folder import INFO, read_info, write_info

LOG = logging.getLogger("det_core")
LIMIT = 64 * 2**20
RESERVE = 2**20
"""Bytes beyond the limit for what is no row of a series: how the run ended, which checkpoints it has."""
CHUNK = 2**20
LINK_CHECK = 1.0
"""Seconds between two looks at the link count."""
RETRY_FIRST, RETRY_MOST = 1.0, 30.0
"""Seconds to the next attempt after a failure: doubled each time."""
KEPT_OPEN = 32
"""Earlier files that stay open, so that they can be read back when they are deleted."""
IN_MEMORY = -1
"""The place of a line that is not in a file yet."""


class _File:
    """A journal file.

    Attributes:
        path: where it is.
        fd: open for reading, too; -1 when it is closed.
        shift: where its offset 0 stands on disk.
        gone: whether somebody deleted it.
    """

    __slots__ = ("fd", "gone", "path", "shift")

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.shift, self.gone = path, fd, 0, False


class Owner(Protocol):
    """Who wants to know where a line that was kept in memory landed."""

    def placed(self, step: int, line: bytes, file: int, offset: int) -> None:
        """The line is now in ``file`` at ``offset``."""


class _Kept:
    """A line in memory."""

    __slots__ = ("line", "owner", "step")

    def __init__(self, line: bytes, owner: Owner | None, step: int) -> None:
        self.line, self.owner, self.step = line, owner, step


class Sink:
    """Appends lines to ``journal-<restart>-<rank>.jsonl`` in ``folder``, then to its successors.

    Args:
        folder: made when it is not there.
        stem: file name without number and suffix.
        header: the first line of each file, newline included.
        doors: the system calls.
        new_file: called when writing goes on in a new file, where offsets start again.
        limit: bytes of lines kept in memory at most.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        header: bytes,
        doors: Doors,
        new_file: Callable[[], None],
        limit: int = LIMIT,
    ) -> None:
        self._folder, self._stem, self._header, self._limit = folder, stem, header, limit
        self._doors = doors
        self._write = doors.write
        self._new_file = new_file
        self._files: list[_File] = []
        self._fd = -1
        self._next_name = 0
        self._trouble = True  # not open yet, lines in memory, or a file without a name: the slow way
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._dropped = 0
        self._problem = ""
        self._warned = False
        self._retry_at, self._retry_after = 0.0, RETRY_FIRST
        self._check_from = self._check_until = 0.0
        self._folder_synced = False
        self._torn = False
        self._legible: tuple[_File, _Kept] | None = None
        self._start = 0
        self._info: dict[str, Any] | None = None
        self.offset = 0

    @property
    def file(self) -> int:
        """The number of the file now written."""
        return len(self._files) - 1

    def write(self, line: bytes, now: float, owner: Owner | None = None, step: int = -1) -> int:
        """Append one line.

        Args:
            line: newline included.
            now: wall time, in seconds.
            owner: told the line's place when it is written later.
            step: the step of the row, for ``owner``.

        Returns:
            The line's offset in the current file, or :data:`IN_MEMORY`.
        """
        if self._trouble:
            return self._write_in_trouble(line, owner, step)
        at = self.offset
        try:
            done = self._write(self._fd, line)
            self.offset += done
        except OSError as e:
            return self._failed(e, line, owner, step)
        except BaseException:  # a signal handler raised: the line may be there or not
            self.offset = os.lseek(self._fd, 0, os.SEEK_END) - self._files[-1].shift
            raise
        if done != len(line):
            self._failed(_short(), line, owner, step)
            self._note_part(done)
            return IN_MEMORY
        if not self._check_from <= now < self._check_until:
            self._look(now)
        return at

    def kept(self, owner: Owner, step: int) -> list[bytes]:
        """The lines of ``owner`` and ``step`` that are still in memory."""
        return [k.line for k in self._kept if k.owner is owner and k.step == step]

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes of a file of this sink, for finding an earlier row again."""
        f = self._files[file]
        if f.fd >= 0:
            return self._doors.pread(f.fd, size, offset + f.shift)
        fd = self._doors.open(f.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._doors.pread(fd, size, offset + f.shift)
        finally:
            self._doors.close(fd)

    @property
    def _unlinked(self) -> list[_File]:
        """The files that somebody deleted and that are not copied yet."""
        return [f for f in self._files if f.gone]

    @property
    def whole(self) -> Path | None:
        """The file that all lines are in, so that to sync it is all that :meth:`flush` would do; None: it is not."""
        return None if self._trouble or not self._folder_synced else self._files[-1].path

    def flush(self) -> None:
        """Bring everything to the disk, as far as that is possible now."""
        self._look(_clock.now())
        if self._unlinked:
            self._retry()
        before = -1
        while self._kept and len(self._kept) != before:  # as long as it helps: files may be limited in size
            before = len(self._kept)
            self._retry()
        self._sync()

    def close(self) -> None:
        """Flush and close.

        Raises:
            ReportsNotKept: lines that are in no file with a name.
        """
        self.flush()
        lost = self._dropped + len(self._kept) - self._legible_kept + sum(map(self._count, self._unlinked))
        problem = self._problem
        self.abandon()
        if lost:
            raise ReportsNotKept(f"{lost} report(s) could not be written to {self._folder}: {problem}")

    def abandon(self) -> None:
        """Close the descriptors and forget what is in memory (in a forked child: the parent's)."""
        for f in self._files:
            if f.fd >= 0:
                self._close(f.fd)
                f.fd = -1
        self._fd, self._trouble = -1, True
        self._kept.clear()

    def _write_in_trouble(self, line: bytes, owner: Owner | None, step: int) -> int:
        if self._unlinked and self._fd >= 0 and not self._kept and _clock.monotonic() < self._retry_at:
            return self._write_unlinked(line, owner, step)
        self._keep(line, owner, step)
        if _clock.monotonic() >= self._retry_at:
            self._retry()
        return IN_MEMORY

    def _write_unlinked(self, line: bytes, owner: Owner | None, step: int) -> int:
        """Go on in the file that has lost its name: it can still be read back."""
        at = self.offset
        try:
            done = self._write(self._fd, line)
        except OSError as e:
            return self._failed(e, line, owner, step)
        self.offset += done
        return at if done == len(line) else self._failed(_short(), line, owner, step)

    def _failed(self, error: OSError, line: bytes, owner: Owner | None, step: int) -> int:
        self._torn = True
        self._keep(line, owner, step)
        self._note(error)
        self._put_off()
        return IN_MEMORY

    def _note_part(self, done: int) -> None:
        """So many bytes of the first line in memory are in the file; all but the newline is as good as all to readers.

        It stays in memory all the same: who follows a file waits for the newline.
        """
        if self._kept and done == len(self._kept[0].line) - 1:
            self._legible = self._files[-1], self._kept[0]

    @property
    def _legible_kept(self) -> bool:
        """Whether one of the lines in memory can be read from a file, too."""
        if self._legible is None:
            return False
        file, line = self._legible
        return not file.gone and any(kept is line for kept in self._kept)

    def _keep(self, line: bytes, owner: Owner | None, step: int) -> None:
        self._trouble = True
        limit = self._limit if owner is not None else self._limit + RESERVE
        if self._kept_bytes + len(line) > limit:
            self._dropped += 1
            return
        self._kept.append(_Kept(line, owner, step))
        self._kept_bytes += len(line)

    def _put_off(self) -> None:
        self._retry_at = _clock.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, RETRY_MOST)

    def _note(self, error: OSError) -> None:
        self._problem = error.strerror or str(error)
        if not self._warned:
            self._warned = True
            LOG.warning(
                "the journal in %s cannot be written (%s). Training goes on; reports are kept in memory, up "
                "to %d MB, and written when that is possible again.",
                self._folder,
                self._problem,
                self._limit // 2**20,
            )

    def _look(self, now: float) -> None:
        """Notice a file that was deleted under us."""
        self._check_from, self._check_until = now - LINK_CHECK, now + LINK_CHECK
        for file in self._files:
            if file.fd < 0 or file.gone:
                continue
            try:
                file.gone = self._doors.fstat(file.fd).st_nlink == 0
            except OSError as e:
                self._trouble = True
                self._note(e)
        if self._unlinked:
            self._trouble = True
            if self._fd >= 0:
                self._retry()

    def _retry(self) -> None:
        """Write what is waiting, to a new file where the last write failed."""
        try:
            for file in self._unlinked:
                self._rescue(file)
            if self._fd < 0 or self._torn:
                self._open_new()
            self._write_kept()
        except OSError as e:
            self._drop_empty()
            self._note(e)
            self._put_off()
            return
        self._trouble, self._retry_after = False, RETRY_FIRST

    def _rescue(self, old: _File) -> None:
        """Copy a file that has lost its name into a new one."""
        path, fd = self._create()
        try:
            self._write_all(fd, b"\n")
            at, end = 0, self._doors.fstat(old.fd).st_size
            while at < end:
                chunk = self._doors.pread(old.fd, CHUNK, at)
                if not chunk:
                    raise OSError(errno.EIO, "the deleted journal file cannot be read back")
                self._write_all(fd, chunk)
                at += len(chunk)
        except BaseException:
            self._discard(path, fd)
            raise
        now = "it is there again, with its records" if path == old.path else f"its records are now in {path.name}"
        LOG.warning("the journal file %s was deleted; %s", old.path, now)
        self._restore_info()
        self._close(old.fd)
        if self._fd == old.fd:
            self._fd = fd
        old.path, old.fd, old.shift, old.gone = path, fd, old.shift + 1, False
        self._folder_synced = False

    def _restore_info(self) -> None:
        """Put run.json back where the whole folder was deleted, so that the run keeps its name."""
        if self._info is None or (self._folder / INFO).exists():
            return
        try:
            write_info(self._folder, self._info)
        except OSError as e:
            LOG.warning("%s was deleted, and cannot be written again: %s", self._folder / INFO, e.strerror)

    def _open_new(self) -> None:
        """Go on in a new file; the first one starts with its header, every later one with a newline."""
        self._info = read_info(self._folder) or self._info
        path, fd = self._create()
        head = (b"\n" if self._files else b"") + self._header
        try:
            self._write_all(fd, head)
        except BaseException:
            self._discard(path, fd)
            raise
        for old in [f for f in self._files if f.fd >= 0 and not f.gone][:-KEPT_OPEN]:
            self._close(old.fd)
            old.fd = -1
        self._files.append(_File(path, fd))
        self._fd, self.offset, self._start = fd, len(head), len(head)
        self._folder_synced = self._torn = False
        self._new_file()

    def _drop_empty(self) -> None:
        """Remove a new file that could take no record, so that a full disk is not strewn with them."""
        if self._fd >= 0 and not self._files[-1].gone and self.offset == self._start:
            file = self._files.pop()
            self._discard(file.path, file.fd)
            self._fd = -1

    def _write_kept(self) -> None:
        while self._kept:
            lines: list[bytes] = []
            size = 0
            for kept in self._kept:
                if size and size + len(kept.line) > CHUNK:
                    break
                lines.append(kept.line)
                size += len(kept.line)
            self._torn = True  # until it is known to be whole
            done = self._write(self._fd, b"".join(lines))
            self._torn = False
            whole = self._placed(done)
            if whole != len(lines):
                self._torn = True
                raise _short()

    def _placed(self, done: int) -> int:
        """Let go of the kept lines that are whole among the ``done`` bytes written; returns how many."""
        end, whole = self.offset + done, 0
        while self._kept and self.offset + len(self._kept[0].line) <= end:
            kept = self._kept.popleft()
            self._kept_bytes -= len(kept.line)
            at, self.offset = self.offset, self.offset + len(kept.line)
            whole += 1
            if kept.owner is not None:
                kept.owner.placed(kept.step, kept.line, self.file, at)
        self._note_part(end - self.offset)
        self.offset = end
        return whole

    def _create(self) -> tuple[Path, int]:
        self._doors.makedirs(self._folder, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            number = f".{self._next_name}" if self._next_name else ""
            path = self._folder / f"{self._stem}{number}.jsonl"
            try:
                return path, self._doors.open(path, flags, 0o666)
            except FileExistsError:
                self._next_name += 1

    def _discard(self, path: Path, fd: int) -> None:
        self._close(fd)
        try:
            self._doors.unlink(path)
        except OSError as e:
            LOG.debug("an unfinished journal file stays: %s: %s", path, e)

    def _write_all(self, fd: int, data: bytes) -> None:
        if self._write(fd, data) != len(data):
            raise _short()

    def _sync(self) -> None:
        if self._fd < 0:
            return
        try:
            self._doors.fsync(self._fd)
            if not self._folder_synced:
                fd = self._doors.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    self._doors.fsync(fd)
                finally:
                    self._close(fd)
                self._folder_synced = True
        except OSError as e:
            self._note(e)

    def _close(self, fd: int) -> None:
        try:
            self._doors.close(fd)
        except OSError as e:  # Linux has released the descriptor all the same
            self._note(e)

    def _count(self, file: _File) -> int:
        """The records in a file."""
        at, lines = 0, 0
        try:
            while chunk := self._doors.pread(file.fd, CHUNK, at):
                lines += chunk.count(b"\n")
                at += len(chunk)
        except OSError as e:
            self._note(e)
        return max(lines - 1, 0)


def _short() -> OSError:
    return OSError(errno.ENOSPC, "the disk took only part of a line")
