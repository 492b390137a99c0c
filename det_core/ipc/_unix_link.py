"""Connection between two processes of one node: a unix stream socket with a send queue.

Any thread may send: straight into the socket if nothing is queued, otherwise at the end of the queue, which the ipc
thread flushes when the socket is writable. One thread at a time receives.
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
_DISCONNECTED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


class MessageInterrupted(DistributedError):
    """An exception of a signal handler cut off a message, so the stream is unusable."""


class UnixLink:
    """Stream of frames to and from one process of this node.

    Args:
        sock: connected unix stream socket, owned by the link from now on.
        watch_writable: called, with the link's lock held, when the queue fills (True) or empties (False). The owner
            must call ``flush()`` whenever the socket is writable in between.
        limit: maximum size in bytes of a received frame, for an unauthenticated peer.
    """

    def __init__(
        self, sock: socket.socket, watch_writable: Callable[[UnixLink, bool], None], limit: int | None = None
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.eof = False
        """Whether the peer has closed its end."""
        self.is_drained = False
        """Whether the last ``receive()`` left nothing unread."""
        self.queued = 0
        """Bytes in the queue."""
        self.decoder = FrameDecoder(limit)
        self._watch_writable = watch_writable
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, Sequence[MemoryFile]]] = deque()
        self._files: deque[MemoryFile] = deque()
        self._is_dead = False
        """Whether messages are discarded: the peer does not read them any more."""
        self._is_interrupted = False

    def send(self, packet: Packet | bytes) -> int:
        """Send or queue one frame, in order and without blocking. The caller may change its objects at once.

        Returns:
            The number of its bytes that were queued.

        Raises:
            MessageInterrupted: If an exception cut off an earlier message.
        """
        files: Sequence[MemoryFile] = ()
        if isinstance(packet, bytes):
            data = packet
        else:
            data, files = packet.local()
        with self._lock:
            if self._is_dead:
                return 0
            self._begin_message()
            sent = 0 if self._queue else self._write(data, files)
            if sent == len(data):
                self._is_interrupted = False
                return 0
            if sent:
                files = ()  # the kernel passes them with the first byte
            rest = memoryview(data)[sent:]
            self._queue.append((rest, files))
            self.queued += len(rest)
            if len(self._queue) == 1:
                self._watch_writable(self, True)
            self._is_interrupted = False
            return len(rest)

    def flush(self) -> int:
        """Send from the queue without blocking, and return the number of bytes that have left it."""
        with self._lock:
            before = self.queued
            self._begin_message()
            while self._queue:
                data, files = self._queue[0]
                sent = self._write(data, files)
                self.queued -= sent
                if sent < len(data):
                    if sent:
                        files = ()
                    self._queue[0] = (data[sent:], files)
                    break
                self._queue.popleft()
            else:
                self._watch_writable(self, False)
            self._is_interrupted = False
            return before - self.queued

    def _write(self, data: bytes | memoryview, files: Sequence[MemoryFile]) -> int:
        """Write without blocking, and return the number of bytes written."""
        try:
            if not files:
                return self.sock.send(data, _NO_SIGNAL)
            fds = array.array("i", [file.fd for file in files])
            return self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except _DISCONNECTED:
            # Not an error here: the ipc thread, which watches the peer, still has to read what it sent before.
            self._is_dead = True
            return len(data)
        except OSError as e:
            # Too many descriptors in flight for this user (RLIMIT_NOFILE): retried once a receiver has taken some.
            if e.errno != errno.ETOOMANYREFS:
                raise
            return 0

    def _begin_message(self) -> None:
        """Mark the stream unusable until the message is out: a signal handler may raise at any line in between."""
        if self._is_interrupted:
            raise MessageInterrupted("cannot send to another rank: an exception in a signal handler cut off a message")
        self._is_interrupted = True

    def receive(self) -> list[Frame]:
        """Read once without blocking, and return the frames that this completes. Sets ``eof`` at the end.

        Raises:
            BadFrame: If the peer does not speak this protocol, or this process ran out of descriptors.
        """
        try:
            self.is_drained = False
            received, ancillary, flags, _ = self.sock.recvmsg_into([self.decoder.buffer()], _ANCILLARY, _CLOSE_ON_EXEC)
        except BlockingIOError:
            self.is_drained = True
            return []
        except _DISCONNECTED:
            self.eof = True
            return []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i", data[: len(data) - len(data) % _FD_SIZE])
                self._files.extend(MemoryFile(fd, 0) for fd in fds)
        if flags & _TRUNCATED:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise BadFrame(f"memory file lost: this process has more than {limit} open files; raise `ulimit -n`")
        if received == 0:
            self.eof = True
            return []
        frames = []
        for frame, lengths, body in self.decoder.received(received):
            if len(lengths) == 1 and not self._files:
                frame.segments = (body,)
            elif lengths:
                frame.segments = cut_body(lengths, body, self._take_files())
                # Only memory files: bytes in the stream were credited when the kernel took them.
                frame.credit = sum(segment.size for segment in frame.segments if isinstance(segment, MemoryFile))
            frames.append(frame)
        return frames

    def _take_files(self) -> Iterator[MemoryFile]:
        while self._files:
            yield self._files.popleft()
        raise BadFrame("frame without its memory files")

    def kill(self) -> None:
        """Discard the queue and all further messages: the peer is lost or has departed."""
        with self._lock:
            self._is_dead = True
            self._queue.clear()
            self.queued = 0
            self._watch_writable(self, False)

    def close(self) -> None:
        """Close the socket of this process; copies in forked children stay open."""
        self._is_dead = True
        self.sock.close()
        self._files.clear()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the kernel's pid and user ID of the process at the other end; pid 0 is one of another PID namespace."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
