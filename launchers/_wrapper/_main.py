"""One rank under our launcher: it does what the launcher says over its socket, and dies with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

from ._alone import Alone
from ._handed import handed, place_elsewhere
from ._protocol import MAX_MESSAGE, pack, same_user, unpack
from ._rank import PATIENCE, RankProcess, rank_of
from ._session import kill_the_others


def main() -> None:
    """``_wrapper SOCKET RANK_VARIABLES HOST -- COMMAND…`` (or ``@ FILE``), run by the framework's agent.

    On another machine than HOST, where the launcher runs, it connects to :mod:`_far`, and stands alone where there is
    none. FILE holds the words of the command.
    """
    path, variables, host, kind, *command = sys.argv[1:]
    if kind == "@":
        with open(command[0], "rb") as file:
            command = [os.fsdecode(word) for word in file.read().split(b"\0")]
    if host and host != socket.gethostname():
        folder = place_elsewhere(os.path.dirname(path))
        os.environ.update(handed(folder))
        path = f"{folder}/s"
        if not os.path.exists(path):
            os._exit(Alone(rank_of(variables)).run(command))
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(path)
    except OSError:
        os._exit(1)  # the launcher has gone: nothing is to start any more
    if not same_user(link):
        os._exit(1)
    status = Wrapper(link, os.path.dirname(path), rank_of(variables)).run(command)
    link.close()
    os._exit(status)


class Wrapper(RankProcess):
    """The wrapper of one script.

    Args:
        link: connected to the launcher.
        folder: the launcher's, with its socket and the locks of the outputs.
        rank: the script's.
    """

    def __init__(self, link: socket.socket, folder: str, rank: int) -> None:
        super().__init__(rank, link.fileno(), folder)
        self._link, self._folder = link, folder
        self._teardown_seconds = 0.0
        self._stopping = False  # the launcher has told the script to end: the agent's wishes count no more
        self._under_program = False  # in a session with the framework's own program and what that has started
        self._leaving = False  # all ranks of this machine have ended, or the agent ends them

    def run(self, command: list[str]) -> int:
        """Run ``command`` to its end; the status is for the framework's agent."""
        self._say(pack("hello", self._rank, os.getpid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        try:
            message, fds, *_ = socket.recv_fds(self._link, MAX_MESSAGE, 2)
        except ConnectionResetError:
            return 1
        if not message:
            return 1
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds() takes no notice of MSG_CMSG_CLOEXEC
        _, (capture, tail, seconds, waits), _ = unpack(message)
        self._teardown_seconds, self._under_program = float(seconds), waits == "1"
        out, err = fds if len(fds) == 2 else (1, 2)
        pump = self._carry(command, out if capture == "0" else 1, err if capture in ("0", _inode(2)) else 2)
        self._say(pack("end", pump.lost, payload=pump.tail(int(tail))[-MAX_MESSAGE // 2 :]))
        status = self._status or 0
        if self._stopping:
            # A script that ends because the launcher said so is no failure that the agent should act on, by ending
            # the other ranks before they have saved or by starting all again.
            return 0
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while status and self._under_program and not self._leaving:
            self._told(self._hear())
        return status if status >= 0 else 128 - status

    def _news(self) -> None:
        self._told(self._hear())

    def _terminated(self) -> None:
        self._leaving = True
        self._tear_down()  # the agent: another rank has failed

    def _tear_down(self) -> None:
        if not self._stopping and not self._plan:
            now, seconds = time.monotonic(), self._teardown_seconds
            self._plan = [(now + min(PATIENCE, seconds / 2), signal.SIGTERM), (now + seconds, signal.SIGKILL)]

    def _started(self) -> None:
        self._say(pack("started", self._script))

    def _ended(self) -> None:
        self._say(pack("exit", self._status, time.monotonic()))

    def _hear(self) -> bytes:
        try:
            return self._link.recv(MAX_MESSAGE)
        except ConnectionResetError:  # it died before it had read all that was sent to it
            return b""

    def _told(self, message: bytes) -> None:
        if not message:  # the launcher has died
            import shutil

            self._kill()
            shutil.rmtree(self._folder, ignore_errors=True)  # which the launcher could not do
            if self._under_program:
                kill_the_others()
            os._exit(1)
        kind, words, _ = unpack(message)
        if kind == "signal":
            if words[1] == "1":
                self._stopping, self._plan = True, []
            self._send(int(words[0]))
        elif kind == "teardown":
            self._tear_down()
        elif kind == "leave":
            self._leaving = True
        elif kind == "kill":
            self._kill()
            self._leave_at = time.monotonic() + 3

    def _say(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher has died, which the next look at the link will show
            self._link.send(message)


def _inode(fd: int) -> str:
    return str(os.fstat(fd).st_ino)
