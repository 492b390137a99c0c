"""The launcher's place on another machine: wrappers there connect to it as if it were the launcher itself.

What they say and print goes to the launcher over this process's stdout, and what the launcher says comes over its
stdin, by way of ssh and :mod:`_near`. When that connection ends, wrappers see their launcher die, and nothing is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import sys
import termios
import threading

from ._frames import BEAT, CLOSE, ERR, MESSAGE, OPEN, OUT, Frames, frame
from ._handed import NAME, place_elsewhere
from ._protocol import MAX_MESSAGE, same_user
from ._rank import large_pipe

READY = b"det-core: ready\n"
SILENCE = 90.0
"""Seconds without a sign of life after which the other side counts as dead."""
_CHUNK = 128 * 1024


def main() -> None:
    """``_far FOLDER SIZE``, with so many bytes for :mod:`_handed` as the begin of stdin.

    ``FOLDER`` is the launcher's, on its machine.
    """
    launchers, size = sys.argv[1], int(sys.argv[2])
    folder = place_elsewhere(launchers)
    os.umask(0o077)
    os.mkdir(folder)
    try:
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: sys.exit(1))
        with open(f"{folder}/{NAME}", "wb") as file:
            while size and (piece := os.read(0, size)):
                size -= file.write(piece)
        Far(folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(f"{launchers}/s"):  # else it is the launcher's own one, in a file system for all machines
            shutil.rmtree(launchers, ignore_errors=True)  # where frameworks keep things that they may have left


class Far:
    """Serves the wrappers of this machine.

    Args:
        folder: where its socket is to be.
    """

    def __init__(self, folder: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{folder}/s")
        self._listener.listen(1024)
        self._links: dict[int, socket.socket] = {}
        self._starters: dict[int, int] = {}
        self._count = 0
        self._prints = {OUT: large_pipe(), ERR: large_pipe()}

    def run(self) -> None:
        """Return when the other side has gone; what started the wrappers that are still there has no business then."""
        try:
            self._carry_down()
        finally:
            for starter in list(self._starters.values()):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(starter, signal.SIGKILL)

    def _carry_down(self) -> None:
        _say(READY)
        threading.Thread(target=self._carry_up, name="up", daemon=True).start()
        frames, poll = Frames(), select.poll()
        poll.register(0, select.POLLIN)
        # Twice, because this process may itself have been stopped for so long.
        while (poll.poll(SILENCE * 500) or poll.poll(SILENCE * 500)) and (data := os.read(0, _CHUNK)):
            for kind, number, content in frames.feed(data):
                if kind != BEAT and (link := self._links.get(number)):
                    self._tell(link, kind, content)

    def _tell(self, link: socket.socket, kind: bytes, content: bytes) -> None:
        with contextlib.suppress(OSError):  # the wrapper has ended: the other thread will see it
            if kind == CLOSE:
                link.shutdown(socket.SHUT_RDWR)
            elif content.startswith(b"start "):
                ends = [self._prints[stream][1] for stream in (OUT, ERR)]
                socket.send_fds(link, [content], ends)
            else:
                link.send(content, socket.MSG_DONTWAIT)

    def _carry_up(self) -> None:
        try:
            poll = select.poll()
            sources = {ends[0]: stream for stream, ends in self._prints.items()}
            for fd in (self._listener.fileno(), *sources):
                poll.register(fd, select.POLLIN)
            numbers: dict[int, int] = {}
            while True:
                for fd, _ in poll.poll():
                    if fd in sources:
                        _say(frame(sources[fd], content=os.read(fd, _CHUNK)))
                    elif fd == self._listener.fileno():
                        self._accept(poll, numbers)
                    else:
                        self._hear(poll, numbers, fd)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the other side has gone, or this one is broken

    def _accept(self, poll: select.poll, numbers: dict[int, int]) -> None:
        link, _ = self._listener.accept()
        if not same_user(link):
            link.close()
            return
        self._count += 1
        self._links[self._count], numbers[link.fileno()] = link, self._count
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3, or a Python that was built on one
            self._starters[self._count] = os.pidfd_open(_starter(link))
        poll.register(link.fileno(), select.POLLIN)
        _say(frame(OPEN, self._count))

    def _hear(self, poll: select.poll, numbers: dict[int, int], fd: int) -> None:
        number = numbers[fd]
        link = self._links[number]
        try:
            message = link.recv(MAX_MESSAGE)
        except ConnectionResetError:
            message = b""
        for stream, (source, _) in self._prints.items():  # what it has printed before it said this
            waiting = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, bytes(4)))[0]
            while waiting > 0:
                piece = os.read(source, min(waiting, _CHUNK))
                waiting -= len(piece)
                _say(frame(stream, content=piece))
        if message:
            _say(frame(MESSAGE, number, message))
            return
        poll.unregister(fd)
        del self._links[number], numbers[fd]
        link.close()
        if (starter := self._starters.pop(number, None)) is not None:
            os.close(starter)
        _say(frame(CLOSE, number))


def _starter(link: socket.socket) -> int:
    """The parent of the process at the other end: what the framework uses on this machine to start ranks."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    with open(f"/proc/{struct.unpack('3i', credentials)[0]}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    if parent <= 1:
        raise OSError("it has no parent any more")
    return parent


def _say(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]
