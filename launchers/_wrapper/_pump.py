"""The thread that carries a script's output to the launcher's, line by line prefixed.

A thread, because a write to a slow or stopped reader blocks, and the wrapper must hear its launcher meanwhile.

The processor is the training's. What is carried costs by the piece rather than by the line, so pieces are as large as
its cache likes, and a script that writes line after line is not followed line by line.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections import deque

from ._lines import Prefixer

_CHUNK = 128 * 1024
"""Bytes read at a time; copies of more leave the cache, and their memory is the kernel's to give anew each time."""
_PAUSE = 0.002
"""Seconds for which a script that writes often is left alone, so that its lines come in pieces."""
_TAIL = 64 * 1024


class Stream:
    """One stream of a script: where it is read, where it goes, and the lock of that place.

    Args:
        source: the pipe to read.
        target: the file descriptor to write to.
        prefix: goes before every line.
        locks: a folder; ranks that write to the same place take turns by a lock file there, so that no line is cut by
            another's (a pipe alone keeps only 4096 bytes together). Without one they take turns by a lock on the place
            itself, if it can be opened anew.
    """

    def __init__(self, source: int, target: int, prefix: bytes, locks: str | None) -> None:
        self.source, self.target = source, target
        self.lines = Prefixer(prefix, terminal=os.isatty(target))
        self.much = min(_CHUNK, fcntl.fcntl(source, fcntl.F_GETPIPE_SZ) // 4)
        self.lock = place_lock(target, locks)


class Pump(threading.Thread):
    """Runs until every stream has ended, or :meth:`finish` was called and nothing more is there to read.

    Attributes:
        done: a file descriptor that is readable once the thread has ended.
        failure: what ended it, if that was an error.
    """

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__(name="pump", daemon=True)
        self._locks = [stream.lock for stream in streams if stream.lock is not None]
        self._streams = {stream.source: stream for stream in streams}
        self._wake, self._woken = os.pipe()
        self.done, self._end = os.pipe()
        self._finishing = False
        self._hurry = False  # a stream has ended, or has more to read than it should have to hold
        self._tail: deque[bytes] = deque()  # the last pieces that were written, _TAIL bytes of them or a piece more
        self._tail_size = 0
        self.lost = 0
        self.failure: BaseException | None = None

    def finish(self) -> None:
        """End as soon as the pipes are empty, though some process may still hold them."""
        self._finishing = True
        os.write(self._woken, b".")

    def tail(self, lines: int) -> bytes:
        """The last ``lines`` lines of both streams, in the order in which they came."""
        return b"".join(b"".join(self._tail)[-_TAIL:].splitlines(keepends=True)[-lines:]) if lines else b""

    def close(self) -> None:
        """Free what an ended pump holds."""
        for fd in (self._wake, self._woken, self.done, *self._locks):
            os.close(fd)

    def run(self) -> None:
        """Carry bytes until the end."""
        try:
            self._carry()
        except BaseException as e:
            self.failure = e
        finally:
            os.close(self._end)

    def _carry(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for source in self._streams:
            poll.register(source, select.POLLIN)
        looked = 0.0
        while self._streams:
            ready = poll.poll(200 if self._finishing else None)
            if not ready:
                break
            often, looked = time.monotonic() - looked < 2 * _PAUSE, time.monotonic()
            self._hurry = self._finishing
            for fd, _ in ready:
                if fd == self._wake:
                    os.read(fd, 1)
                elif not self._step(self._streams[fd]):
                    poll.unregister(fd)
                    os.close(fd)
                    del self._streams[fd]
            if often and not self._hurry:
                time.sleep(_PAUSE)
        for stream in self._streams.values():
            self._write(stream, stream.lines.flush())
            os.close(stream.source)

    def _step(self, stream: Stream) -> bool:
        """Carry what can be read now; False at the end of the stream, or when its reader has gone."""
        data = os.read(stream.source, _CHUNK)
        self._hurry |= len(data) >= stream.much or not data
        out = stream.lines.feed(data) if data else stream.lines.flush()
        return self._write(stream, out) and bool(data)

    def _write(self, stream: Stream, out: bytes) -> bool:
        if not out:
            return True
        self._remember(out)
        try:
            write_locked(stream.target, stream.lock, out)
        except BrokenPipeError:  # the script's pipe is closed in turn, so it learns as it would without us
            return False
        except OSError:  # such as a full disk: training goes on, and the loss is told at the end
            self.lost += len(out)
        return True

    def _remember(self, out: bytes) -> None:
        self._tail.append(out[-_TAIL:])
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= _TAIL:
            self._tail_size -= len(self._tail.popleft())


def place_lock(target: int, folder: str | None) -> int | None:
    """A file to lock while something is written to ``target``; None where there can be none."""
    if folder is not None:
        place = os.fstat(target)
        path = f"{folder}/{place.st_dev}-{place.st_ino}.lock"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:  # a lock belongs to an open file, and this one may be shared with other ranks
        return os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, or another user's file
        return None


def write_locked(target: int, lock: int | None, data: bytes) -> None:
    """Write ``data`` while nobody else who knows the lock writes there."""
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        _write_all(target, data)
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever gave us this descriptor uses it without blocking
            ready = select.poll()
            ready.register(fd, select.POLLOUT)
            ready.poll()
