"""One connection between two processes of a machine: a unix stream socket, with a queue for what it cannot take yet.

Any thread sends: straight into the socket when nothing is queued, else behind what is queued, which the ipc thread
sends on when the socket has room again. One thread at a time receives.
"""

from __future__ import annotations

import array
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from det_core.errors import DistributedError
from det_core.ipc._frames import BadFrame, Buffer, Cutter, Frame
from det_core.ipc._payload import MemoryFile, Packet, cut_body

_FD_SIZE = array.array("i").itemsize
_ANCILLARY = socket.CMSG_SPACE(253 * _FD_SIZE)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_GONE = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


class Interrupted(DistributedError):
    """A signal handler raised in the middle of a message: the stream cannot be used any more."""


class UnixLink:
    """A stream of frames to and from one process of this machine.

    Args:
        sock: a connected unix stream socket, owned by the link from now on.
        arm: called (with the link's lock held) when the queue becomes non-empty: have ``flush()`` called when the
            socket is writable.
        disarm: called when the queue is empty again.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        arm: Callable[[UnixLink], None],
        disarm: Callable[[UnixLink], None],
        limit: int | None = None,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.eof = False
        self.queued = 0
        """Bytes that wait in our memory for the socket to take them."""
        self.cutter = Cutter(limit=limit)
        self._arm, self._disarm = arm, disarm
        self._lock = threading.Lock()
        self._queue: deque[tuple[list[memoryview], tuple[MemoryFile, ...]]] = deque()
        self._files: deque[MemoryFile] = deque()
        self._dead = False
        self._torn = False

    # sending

    def send(self, packet: Packet | bytes) -> int:
        """Send or queue one frame, in order. Never blocks; what is queued is copied, so the caller may change it.

        Returns:
            How many of its bytes had to be queued.
        """
        if isinstance(packet, bytes):
            parts: Sequence[Buffer] = (packet,)
            files: Sequence[MemoryFile] = ()
        else:
            parts, files = packet.local()
        with self._lock:
            if self._dead:
                return 0
            self._check()
            self._torn = True
            if self._queue:
                left = [memoryview(p) for p in parts]
            else:
                left, files = self._write(parts, files)
            size = 0
            if left:
                size = sum(p.nbytes for p in left)
                copied = left[:1] if isinstance(packet, bytes) else [memoryview(b"".join(left))]
                self._queue.append((copied, tuple(files)))
                self.queued += size
                if len(self._queue) == 1:
                    self._arm(self)
            self._torn = False
            return size

    def flush(self) -> int:
        """Send on what is queued, as far as the socket takes it; the number of bytes that have left the queue."""
        with self._lock:
            before = self.queued
            self._check()
            self._torn = True
            while self._queue:
                parts, files = self._queue[0]
                left, files_left = self._write(parts, files)
                if not self._queue:  # the peer is gone, and what was queued for it with it
                    continue
                if left:
                    self._queue[0] = (left, tuple(files_left))
                    self.queued = self.queued - sum(p.nbytes for p in parts) + sum(p.nbytes for p in left)
                    break
                self._queue.popleft()
                self.queued -= sum(p.nbytes for p in parts)
            else:
                self.queued = 0
                self._disarm(self)
            self._torn = False
            return before - self.queued

    def _write(
        self, parts: Sequence[Buffer], files: Sequence[MemoryFile]
    ) -> tuple[list[memoryview], Sequence[MemoryFile]]:
        """Write as much as the socket takes; what is left of the parts and files."""
        try:
            if len(parts) == 1 and not files:
                sent = self.sock.send(parts[0], _NO_SIGNAL)
                if sent == len(parts[0]):
                    return [], ()
            else:
                sent = self._sendmsg(parts, files)
                files = ()
        except BlockingIOError:
            return [memoryview(p).cast("B") for p in parts], files
        except _GONE:  # whoever watches the peer says so; here the bytes just have nobody to go to
            self._dead = True
            self._queue.clear()
            return [], ()
        except OSError as e:
            if e.errno != errno.ETOOMANYREFS:
                raise
            return [memoryview(p).cast("B") for p in parts], files
        left = []
        for part in parts:
            view = memoryview(part).cast("B")
            if sent >= view.nbytes:
                sent -= view.nbytes
            else:
                left.append(view[sent:])
                sent = 0
        return left, files

    def _sendmsg(self, parts: Sequence[Buffer], files: Sequence[MemoryFile]) -> int:
        fds = array.array("i", [f.fd for f in files])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if files else []
        return self.sock.sendmsg(parts[:512], ancillary, _NO_SIGNAL)

    def _check(self) -> None:
        if self._torn:
            raise Interrupted("an exception in a signal handler cut off a message to another rank in its middle")

    # receiving

    def receive(self) -> list[Frame]:
        """The frames that the next bytes complete; none when there are none yet. Sets ``eof`` at the end.

        Raises:
            BadFrame: the peer does not speak our protocol, or this process ran out of descriptors.
        """
        try:
            n, ancillary, flags, _ = self.sock.recvmsg_into([self.cutter.room()], _ANCILLARY, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return []
        except _GONE:
            n, ancillary, flags = 0, [], 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
                self._files.extend(MemoryFile(fd, 0) for fd in fds)
        if flags & _TRUNCATED:
            raise BadFrame(f"a memory file could not be received: more than {_limit()} files are open in this process")
        if n == 0:
            self.eof = True
            return []
        return [self._finish(*cut) for cut in self.cutter.fill(n)]

    def _finish(self, frame: Frame, lengths: tuple[int, ...], body: bytearray) -> Frame:
        if len(lengths) == 1 and not self._files:
            frame.segments = (body,)
        elif lengths:
            frame.segments, frame.owed = cut_body(lengths, body, self._take_files())
        return frame

    def _take_files(self) -> Iterator[MemoryFile]:
        while self._files:
            yield self._files.popleft()
        raise BadFrame("a frame without its memory files")

    def detach_file(self) -> MemoryFile:
        """A descriptor that came with the last frame and belongs to none of its segments."""
        return self._files.popleft()

    def kill(self) -> None:
        """Send nothing any more: the peer is gone."""
        with self._lock:
            self._dead = True
            self._queue.clear()
            self.queued = 0
            self._disarm(self)

    def close(self) -> None:
        """Close the socket (which does not touch the copies that forked children may hold)."""
        self._dead = True
        self.sock.close()
        self._files.clear()


def _limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
