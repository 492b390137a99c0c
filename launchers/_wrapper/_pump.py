"""The thread that carries a script's output to the launcher's, line by line prefixed.

A thread, because a write to a slow or stopped reader blocks, and the wrapper must hear its launcher meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading

from ._lines import Prefixer

_CHUNK = 1024 * 1024
_TAIL = 64 * 1024


class Stream:
    """One stream of a script: where it is read, where it goes, and the lock of that place.

    Args:
        source: the pipe to read.
        target: the file descriptor to write to.
        prefix: goes before every line.
        locks: a folder; ranks that write to the same place take turns by a lock file there, so that no line is cut by
            another's (a pipe alone keeps only 4096 bytes together).
    """

    def __init__(self, source: int, target: int, prefix: bytes, locks: str) -> None:
        place = os.fstat(target)
        self.source, self.target = source, target
        self.lines = Prefixer(prefix, terminal=os.isatty(target))
        self.lock = os.open(f"{locks}/{place.st_dev}-{place.st_ino}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Pump(threading.Thread):
    """Runs until every stream has ended, or :meth:`finish` was called and nothing more is there to read.

    Attributes:
        done: a file descriptor that is readable once the thread has ended.
        failure: what ended it, if that was an error.
    """

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__(name="pump", daemon=True)
        self._locks = [stream.lock for stream in streams]
        self._streams = {stream.source: stream for stream in streams}
        self._wake, self._woken = os.pipe()
        self.done, self._end = os.pipe()
        self._finishing = False
        self._tail = b""
        self.lost = 0
        self.failure: BaseException | None = None

    def finish(self) -> None:
        """End as soon as the pipes are empty, though some process may still hold them."""
        self._finishing = True
        os.write(self._woken, b".")

    def tail(self, lines: int) -> bytes:
        """The last ``lines`` lines of both streams, in the order in which they came."""
        return b"".join(self._tail.splitlines(keepends=True)[-lines:]) if lines else b""

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
        while self._streams:
            ready = poll.poll(200 if self._finishing else None)
            if not ready:
                break
            for fd, _ in ready:
                if fd == self._wake:
                    os.read(fd, 1)
                elif not self._step(self._streams[fd]):
                    poll.unregister(fd)
                    os.close(fd)
                    del self._streams[fd]
        for stream in self._streams.values():
            self._write(stream, stream.lines.flush())
            os.close(stream.source)

    def _step(self, stream: Stream) -> bool:
        """Carry what can be read now; False at the end of the stream, or when its reader has gone."""
        data = os.read(stream.source, _CHUNK)
        out = stream.lines.feed(data) if data else stream.lines.flush()
        return self._write(stream, out) and bool(data)

    def _write(self, stream: Stream, out: bytes) -> bool:
        if not out:
            return True
        self._tail = out[-_TAIL:] if len(out) >= _TAIL else (self._tail + out)[-_TAIL:]
        fcntl.flock(stream.lock, fcntl.LOCK_EX)
        try:
            _write_all(stream.target, out)
        except BrokenPipeError:  # the script's pipe is closed in turn, so it learns as it would without us
            return False
        except OSError:  # such as a full disk: training goes on, and the loss is told at the end
            self.lost += len(out)
        finally:
            fcntl.flock(stream.lock, fcntl.LOCK_UN)
        return True


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever gave us this descriptor uses it without blocking
            ready = select.poll()
            ready.register(fd, select.POLLOUT)
            ready.poll()
