"""One rank: start its script, carry its output, pass signals on, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time

from ._protocol import MAX_MESSAGE, pack, same_user, unpack
from ._pump import Pump, Stream
from ._script import start

PATIENCE = 5.0
"""Seconds that a script gets to find out by itself that another rank was lost, before it is told with SIGTERM."""
LINGER = 1.0
"""Seconds that the other processes of a script's group get to go after it (some remove what it shared)."""
_PASSED_ON = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """``_wrapper SOCKET RANK_VARIABLES -- COMMAND…``, run by the framework's agent."""
    path, variables, _, *command = sys.argv[1:]
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(path)
    except OSError:
        os._exit(1)  # the launcher has gone: nothing is to start any more
    if not same_user(link):
        os._exit(1)
    status = Wrapper(link, os.path.dirname(path), _rank(variables)).run(command)
    link.close()
    os._exit(status)


def _rank(variables: str) -> int:
    for name in variables.split(","):
        if value := os.environ.get(name, ""):
            return int(value)
    raise SystemExit(f"the framework's agent set none of {variables}")


class Wrapper:
    """The wrapper of one script.

    Args:
        link: connected to the launcher.
        folder: the launcher's, with its socket and the locks of the outputs.
        rank: the script's.
    """

    def __init__(self, link: socket.socket, folder: str, rank: int) -> None:
        self._link, self._folder, self._rank = link, folder, rank
        self._script = 0
        self._status: int | None = None
        self._linger_until = 0.0
        self._group_gone = False
        self._stopping = False  # the launcher has told the script to end: the agent's wishes count no more
        self._plan: list[tuple[float, signal.Signals]] = []  # what to send when, if the script does not end
        self._leave_at = float("inf")

    def run(self, command: list[str]) -> int:
        """Run ``command`` to its end; the status is for the framework's agent."""
        self._say(pack("hello", self._rank, os.getpid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        try:
            message, fds, *_ = socket.recv_fds(self._link, MAX_MESSAGE, 1)
        except ConnectionResetError:
            return 1
        if not message:
            return 1
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds() takes no notice of MSG_CMSG_CLOEXEC
        _, (capture, tail, seconds), _ = unpack(message)
        self._teardown_seconds = float(seconds)
        own_stderr = os.fstat(2).st_ino != int(capture) or not fds
        pump, wakeup = self._start(command, 2 if own_stderr else fds[0])
        self._watch(pump, wakeup)
        if pump.failure is not None:
            raise RuntimeError(f"the output of rank {self._rank} could not be carried on") from pump.failure
        self._say(pack("end", pump.lost, payload=pump.tail(int(tail))[-MAX_MESSAGE // 2 :]))
        status = self._status or 0
        # A script that ends because the launcher said so is no failure that the agent should act on, by ending the
        # other ranks before they have saved or by starting all again.
        return 0 if self._stopping else status if status >= 0 else 128 - status

    def _start(self, command: list[str], stderr: int) -> tuple[Pump, int]:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for signum in (signal.SIGCHLD, signal.SIGTERM, *_PASSED_ON):
            signal.signal(signum, _heard)
        (out, out_end), (err, err_end) = _pipe(), _pipe()
        self._script = start(command, _environment(), out_end, err_end, mask)
        os.close(out_end)
        os.close(err_end)
        self._say(pack("started", self._script))
        prefix = b"[rank=%d] " % self._rank
        pump = Pump([Stream(out, 1, prefix, self._folder), Stream(err, stderr, prefix, self._folder)])
        pump.start()  # with all signals blocked, so that the main thread gets them
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pump, woken

    def _watch(self, pump: Pump, wakeup: int) -> None:
        """Return when the script has ended and its output is written."""
        poll = select.poll()
        for fd in (self._link.fileno(), wakeup, pump.done):
            poll.register(fd, select.POLLIN)
        finishing = False
        while pump.failure is None:
            if self._status is not None and not finishing and self._group_ended():
                pump.finish()
                finishing = True
            if finishing and not pump.is_alive():
                return
            for fd, _ in poll.poll(self._wait(finishing)):
                if fd == wakeup:
                    for signum in os.read(wakeup, 1024):
                        self._signalled(signum)
                elif fd == pump.done:
                    poll.unregister(fd)
                    pump.join()
                else:
                    self._told(self._hear())
            self._act(time.monotonic())
        self._kill()

    def _wait(self, finishing: bool) -> float | None:
        """Milliseconds to the next thing to do."""
        if self._status is not None and not finishing:
            return 20
        due = min([self._leave_at, *(at for at, _ in self._plan)])
        return None if due == float("inf") else max(0.0, due - time.monotonic()) * 1000 + 1

    def _act(self, now: float) -> None:
        while self._plan and self._plan[0][0] <= now:
            _, signum = self._plan.pop(0)
            self._kill() if signum == signal.SIGKILL else self._send(signum)
        if now >= self._leave_at:
            os._exit(1)  # killed, and the reader of its output does not read

    def _signalled(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._reap()
        elif signum != signal.SIGTERM:
            self._send(signum)
        elif not self._stopping and not self._plan:  # the agent: another rank has failed
            now, seconds = time.monotonic(), self._teardown_seconds
            self._plan = [(now + min(PATIENCE, seconds / 2), signal.SIGTERM), (now + seconds, signal.SIGKILL)]

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
            os._exit(1)
        kind, words, _ = unpack(message)
        if kind == "signal":
            if words[1] == "1":
                self._stopping, self._plan = True, []
            self._send(int(words[0]))
        elif kind == "kill":
            self._kill()
            self._leave_at = time.monotonic() + 3

    def _reap(self) -> None:
        if self._status is not None:
            return
        pid, status = os.waitpid(self._script, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            self._linger_until = time.monotonic() + LINGER
            self._say(pack("exit", self._status, time.monotonic()))

    def _send(self, signum: int) -> None:
        if self._status is None:  # not reaped, so the process id is still the script's
            os.kill(self._script, signum)

    def _group_ended(self) -> bool:
        """Whether nothing of the script's group is left; what lingers too long is killed."""
        try:
            os.killpg(self._script, 0)
        except OSError:
            self._group_gone = True
        else:
            if time.monotonic() < self._linger_until:
                return False
            self._kill()
        return True

    def _kill(self) -> None:
        if not self._group_gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._script, signal.SIGKILL)

    def _say(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher has died, which the next look at the link will show
            self._link.send(message)


def _environment() -> dict[str, str]:
    """What the agent set, plus what det_core wants to know where there are several machines."""
    environment = dict(os.environ)
    if int(environment.get("GROUP_WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in environment:
        environment.setdefault("DET_CHIEF_IP", environment["MASTER_ADDR"])
    return environment


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    with contextlib.suppress(OSError):  # this user's share of the memory for pipes is used up
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 1024 * 1024)
    return ends


def _heard(signum: int, frame: object) -> None:
    """Does nothing: the signal's number arrives through the wakeup descriptor."""
