"""A script as one rank: started, its output carried, signals passed on, and nothing of it left behind.

Whoever stands above it (a launcher, or just the process that started this one) is known by a lifeline: a file
descriptor that is readable when there is news.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time

from ._pump import Pump, Stream
from ._script import start

PATIENCE = 5.0
"""Seconds that a script gets to find out by itself that another rank was lost, before it is told with SIGTERM."""
LINGER = 1.0
"""Seconds that the other processes of a script's group get to go after it (some remove what it shared)."""
GPUS = "DET_CORE_GPUS"
"""The variable with the ``CUDA_VISIBLE_DEVICES`` that the launcher was given, where the agent changes it."""
_PASSED_ON = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class RankProcess:
    """The process around one script. Those below it say what a lifeline's news, SIGTERM and the script's end mean.

    Args:
        rank: the script's.
        lifeline: a file descriptor.
        locks: where the locks of the outputs lie; see :class:`Stream`.
    """

    def __init__(self, rank: int, lifeline: int, locks: str | None) -> None:
        self._rank, self._lifeline, self._locks = rank, lifeline, locks
        self._script = 0
        self._status: int | None = None
        self._linger_until = 0.0
        self._group_gone = False
        self._plan: list[tuple[float, signal.Signals]] = []  # what to send when, if the script does not end
        self._leave_at = float("inf")

    def _news(self) -> None:
        """The lifeline is readable."""
        raise NotImplementedError

    def _terminated(self) -> None:
        """SIGTERM has come."""
        raise NotImplementedError

    def _started(self) -> None:
        """The script runs."""

    def _ended(self) -> None:
        """The script has ended; some of its output may still be on its way."""

    def _carry(self, command: list[str], out_to: int, err_to: int) -> Pump:
        """Run ``command`` to its end with its output on two file descriptors; return when that is written."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for signum in (signal.SIGCHLD, signal.SIGTERM, *_PASSED_ON):
            signal.signal(signum, _heard)
        (out, out_end), (err, err_end) = large_pipe(), large_pipe()
        self._script = start(command, environment(), out_end, err_end, mask)
        os.close(out_end)
        os.close(err_end)
        self._started()
        prefix = b"[rank=%d] " % self._rank
        pump = Pump([Stream(out, out_to, prefix, self._locks), Stream(err, err_to, prefix, self._locks)])
        pump.start()  # with all signals blocked, so that the main thread gets them
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._watch(pump, woken)
        if pump.failure is not None:
            raise RuntimeError(f"the output of rank {self._rank} could not be carried on") from pump.failure
        return pump

    def _watch(self, pump: Pump, wakeup: int) -> None:
        """Return when the script has ended and its output is written."""
        poll = select.poll()
        for fd in (self._lifeline, wakeup, pump.done):
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
                    self._news()
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
        elif signum == signal.SIGTERM:
            self._terminated()
        else:
            self._send(signum)

    def _reap(self) -> None:
        if self._status is not None:
            return
        pid, status = os.waitpid(self._script, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            self._linger_until = time.monotonic() + LINGER
            self._ended()

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


def rank_of(variables: str) -> int:
    """The rank: a number, or the value of the first of some variables, named with commas between, that is set."""
    if variables.isdigit():
        return int(variables)
    for name in variables.split(","):
        if (value := os.environ.get(name, "")).isdigit():
            return int(value)
    raise SystemExit(f"the rank of this process is not known: none of {variables} is set to a number")


def environment() -> dict[str, str]:
    """What the agent set, plus what det_core wants to know where there are several machines."""
    variables = dict(os.environ)
    if int(variables.get("GROUP_WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in variables:
        variables.setdefault("DET_CHIEF_IP", variables["MASTER_ADDR"])
    if (gpus := variables.pop(GPUS, None)) is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    return variables


def large_pipe() -> tuple[int, int]:
    """A pipe that holds a megabyte, if this user may have one."""
    ends = os.pipe()
    with contextlib.suppress(OSError):  # this user's share of the memory for pipes is used up
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 1024 * 1024)
    return ends


def _heard(signum: int, frame: object) -> None:
    """Does nothing: the signal's number arrives through the wakeup descriptor."""
