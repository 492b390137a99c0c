"""The launcher's end of a connection to another machine: to the launcher each wrapper there looks like one here."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time

from ._far import READY
from ._frames import BEAT, CLOSE, ERR, MESSAGE, OPEN, OUT, Frames, frame
from ._protocol import MAX_MESSAGE, pack, unpack
from ._pump import place_lock, write_locked

BEAT_SECONDS = 15.0
_CHUNK = 128 * 1024
_NOISE = 64 * 1024
"""Bytes that a login shell may print before its command begins."""


def main() -> None:
    """``_near LAUNCHER SOCKET HOST SECONDS COMMAND…``, with what to hand over as stdin.

    ``COMMAND`` runs :mod:`_far` on ``HOST``. Says ``ready`` on stdout once wrappers can connect there, else why not.
    Ends with the process LAUNCHER.
    """
    launcher, path, host, seconds, *command = sys.argv[1:]
    handed = sys.stdin.buffer.read()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
    except OSError as e:
        _answer(f"cannot run {command[0]}: {e.strerror}")
        return
    threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
        process.stdin.write(handed)
    rest = _until_ready(process.stdout.fileno(), time.monotonic() + float(seconds))
    if rest is None:
        process.kill()
        why = process.stderr.read().decode(errors="replace").strip().splitlines()
        _answer(why[-1] if why else "it does not answer")
        return
    _answer("ready")
    threading.Thread(target=_discard, args=(process.stderr.fileno(),), daemon=True).start()
    Near(path, host, process.stdin.fileno()).run(process.stdout.fileno(), rest)


def _answer(text: str) -> None:
    os.write(1, text.encode(errors="surrogateescape") + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _until_ready(fd: int, until: float) -> bytes | None:
    """What comes after the word that all is ready; None if it does not come."""
    heard = b""
    while READY not in heard and len(heard) < _NOISE:
        ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
        data = os.read(fd, _CHUNK) if ready else b""
        if not data:
            return None
        heard += data
    return heard.partition(READY)[2]


def _end_with(pid: int) -> None:
    """End when process ``pid`` does."""
    try:
        try:
            watch = os.pidfd_open(pid)
        except AttributeError:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(1)
        else:
            select.select([watch], [], [])
    finally:
        os._exit(1)


def _discard(fd: int) -> None:
    while os.read(fd, _CHUNK):
        pass


class Near:
    """Carries packets between the launcher's socket and another machine.

    Args:
        path: of that socket.
        host: the other machine's name.
        down: the file descriptor for what goes there.
    """

    def __init__(self, path: str, host: str, down: int) -> None:
        self._path, self._host, self._down = path, host, down
        self._turn = threading.Lock()
        self._links: dict[int, socket.socket] = {}
        self._printed = {OUT: bytearray(), ERR: bytearray()}  # the begins of lines
        self._places: dict[bytes, tuple[int, int | None]] = {}

    def run(self, up: int, data: bytes) -> None:
        """Carry what comes from ``up``, of which ``data`` is there, until it ends."""
        threading.Thread(target=self._beat, daemon=True).start()
        frames = Frames()
        for packet in frames.feed(data):
            self._hear(*packet)
        while data := os.read(up, _CHUNK):
            for packet in frames.feed(data):
                self._hear(*packet)
        for stream, held in self._printed.items():
            if held:
                self._print(stream, bytes(held) + b"\n")

    def _hear(self, kind: bytes, number: int, content: bytes) -> None:
        if kind == OPEN:
            self._open(number)
        elif kind in self._printed:
            held, end = self._printed[kind], content.rfind(b"\n") + 1
            if end:
                self._print(kind, bytes(held) + content[:end])
                held.clear()
            held += content[end:]
        elif link := self._links.get(number):
            with contextlib.suppress(OSError):  # the launcher has gone, and with it soon this process
                if kind == MESSAGE:
                    link.send(self._translated(content))
                elif kind == CLOSE:
                    link.shutdown(socket.SHUT_RDWR)

    def _open(self, number: int) -> None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(self._path)
        except OSError:
            self._say(frame(CLOSE, number))
            return
        self._links[number] = link
        threading.Thread(target=self._carry_down, args=(number, link), daemon=True).start()

    def _carry_down(self, number: int, link: socket.socket) -> None:
        """Carry what the launcher says to one wrapper."""
        while True:
            try:
                message, places, *_ = socket.recv_fds(link, MAX_MESSAGE, 2)
            except ConnectionResetError:
                message, places = b"", []
            if not message:
                break
            if places:
                self._print_to(*places)
            self._say(frame(MESSAGE, number, message))
        self._links.pop(number, None)
        link.close()
        self._say(frame(CLOSE, number))

    def _translated(self, message: bytes) -> bytes:
        """A wrapper's message in terms of this machine: its host's name, and the clock here."""
        kind, words, payload = unpack(message)
        if kind == "hello":
            words = [*words, self._host]
        elif kind == "exit":
            words[1] = str(time.monotonic())
        return pack(kind, *words, payload=payload)

    def _print_to(self, out: int, err: int) -> None:
        """Know the launcher's stdout and stderr, which it sends to every wrapper."""
        with self._turn:
            if self._places:
                os.close(out)
                os.close(err)
            else:
                folder = os.path.dirname(self._path)
                self._places = {OUT: (out, place_lock(out, folder)), ERR: (err, place_lock(err, folder))}

    def _print(self, stream: bytes, lines: bytes) -> None:
        if place := self._places.get(stream):
            with contextlib.suppress(OSError):  # its reader has gone
                write_locked(*place, lines)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._say(frame(BEAT))

    def _say(self, data: bytes) -> None:
        with self._turn, contextlib.suppress(OSError):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._down, rest) :]
