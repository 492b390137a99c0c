"""One connection between two processes of a machine: a unix stream socket, with a queue for what it cannot take yet.

Any thread sends: straight into the socket when nothing is queued, else behind what is queued, which the ipc thread
sends on when the socket has room again. One thread at a time receives.
"""

from __future__ import annotations

import array
import errno
import resource
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from det_core.errors import DistributedError
from det_core.ipc._frames import BadFrame, Frame, FrameDecoder
from det_core.ipc._serialization import MemoryFile, Packet, cut_body

_FD_SIZE = array.array("i").itemsize
_ANCILLARY = socket.CMSG_SPACE(253 * _FD_SIZE)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_GONE = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


class MessageInterrupted(DistributedError):
    """A signal handler raised in the middle of a message: the stream cannot be used any more."""


class UnixLink:
    """A stream of frames to and from one process of this machine.

    Args:
        sock: a connected unix stream socket, owned by the link from now on.
        arm: called (with the link's lock held) with whether something is queued, when that changes: have ``flush()``
            called when the socket is writable, or no more.
        limit: bytes a received frame may have, while the peer is not known.
    """

    def __init__(
        self, sock: socket.socket, watch_writable: Callable[[UnixLink, bool], None], limit: int | None = None
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.eof = False
        self.is_drained = False
        """Whether the last look found nothing to receive."""
        self.queued = 0
        """Bytes that wait in our memory for the socket to take them."""
        self.decoder = FrameDecoder(limit)
        self._watch_writable = watch_writable
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, Sequence[MemoryFile]]] = deque()
        self._files: deque[MemoryFile] = deque()
        self._dead = False
        self._is_interrupted = False

    # sending

    def send(self, packet: Packet | bytes) -> int:
        """Send or queue one frame, in order. Never blocks; its bytes are our own, so the caller may change his.

        Returns:
            How many of its bytes had to be queued.

        Raises:
            Interrupted: an earlier call was torn by an exception.
        """
        data, files = (packet, ()) if isinstance(packet, bytes) else packet.local()
        with self._lock:
            if self._dead:
                return 0
            self._begin_message()
            left: memoryview | None = memoryview(data) if self._queue else None
            if left is None:
                sent = self._write(data, files)
                if sent == len(data):
                    self._is_interrupted = False
                    return 0
                left, files = memoryview(data)[sent:], () if sent else files
            self._queue.append((left, files))
            self.queued += len(left)
            if len(self._queue) == 1:
                self._watch_writable(self, True)
            self._is_interrupted = False
            return len(left)

    def flush(self) -> int:
        """Send on what is queued, as far as the socket takes it; the number of bytes that have left the queue."""
        with self._lock:
            before = self.queued
            self._begin_message()
            while self._queue:
                data, files = self._queue[0]
                sent = self._write(data, files)
                self.queued -= sent
                if sent < len(data):
                    self._queue[0] = (data[sent:], () if sent else files)
                    break
                self._queue.popleft()
            else:
                self._watch_writable(self, False)
            self._is_interrupted = False
            return before - self.queued

    def _write(self, data: bytes | memoryview, files: Sequence[MemoryFile]) -> int:
        """Write as much as the socket takes; how much that was."""
        try:
            if not files:
                return self.sock.send(data, _NO_SIGNAL)
            fds = array.array("i", [f.fd for f in files])
            return self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except _GONE:  # whoever watches the peer says so; here the bytes just have nobody to go to
            self._dead = True
            return len(data)
        except OSError as e:
            if e.errno != errno.ETOOMANYREFS:
                raise
            return 0

    def _begin_message(self) -> None:
        """Until the message is out, an exception (of a signal handler, in any line) leaves half of one behind."""
        if self._is_interrupted:
            raise MessageInterrupted("an exception in a signal handler cut off a message to another rank in its middle")
        self._is_interrupted = True

    # receiving

    def receive(self) -> list[Frame]:
        """The frames that the next bytes complete; none when there are none yet. Sets ``eof`` at the end.

        Raises:
            BadFrame: the peer does not speak our protocol, or this process ran out of descriptors.
        """
        try:
            self.is_drained = False
            n, ancillary, flags, _ = self.sock.recvmsg_into([self.decoder.buffer()], _ANCILLARY, _CLOSE_ON_EXEC)
        except BlockingIOError:
            self.is_drained = True
            return []
        except _GONE:
            n, ancillary, flags = 0, [], 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i", data[: len(data) - len(data) % _FD_SIZE])
                self._files.extend(MemoryFile(fd, 0) for fd in fds)
        if flags & _TRUNCATED:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise BadFrame(f"a memory file could not be received: more than {most} files are open in this process")
        if n == 0:
            self.eof = True
            return []
        frames = []
        for frame, lengths, body in self.decoder.received(n):
            if len(lengths) == 1 and not self._files:
                frame.segments = (body,)
            elif lengths:
                frame.segments = cut_body(lengths, body, self._take_files())
                frame.owed = sum(s.size for s in frame.segments if isinstance(s, MemoryFile))
            frames.append(frame)
        return frames

    def _take_files(self) -> Iterator[MemoryFile]:
        while self._files:
            yield self._files.popleft()
        raise BadFrame("a frame without its memory files")

    # the end

    def kill(self) -> None:
        """Send nothing any more: the peer is gone."""
        with self._lock:
            self._dead = True
            self._queue.clear()
            self.queued = 0
            self._watch_writable(self, False)

    def close(self) -> None:
        """Close the socket (which does not touch the copies that forked children may hold)."""
        self._dead = True
        self.sock.close()
        self._files.clear()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The pid (0: of another name space) and the user of the process at the other end, as the kernel knows them."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
