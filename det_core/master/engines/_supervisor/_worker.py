"""The worker: starts the script, carries its output, obeys, ends what is left, writes down the end."""

from __future__ import annotations

import os
import select
import signal
import time

from ._end import write_end, write_processes
from ._log import CHUNK, Flight, Log
from ._script import CannotRun, start, words
from ._tree import below, end_all, processes, send

PATIENCE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_DRAIN = 0.3
_IDLE = 10.0
_NEVER = float("inf")


class Pipes:
    """The two pipes of a script. Guardian and worker both hold the ends that are read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.write: list[int] = []
        for _ in range(2):
            source, target = os.pipe()
            self.read.append(source)
            self.write.append(target)

    def close(self) -> None:
        """Close the ends that are written, in this process."""
        for fd in self.write:
            os.close(fd)


class Worker:
    """Runs one allocation from its start to ``exit.json``.

    Args:
        folder: the allocation's folder.
        control: a datagram socket: ``kill SECONDS`` means to end all in so many seconds.
        pipes: the script's output.
        flight: what was read and is not in the log yet.
        guardian: the process that stands by.
        visible: whether to try and let the information files appear at the contract's path.
    """

    def __init__(
        self, folder: str, control: int, pipes: Pipes, flight: Flight, guardian: int, *, visible: bool
    ) -> None:
        self._folder = folder
        self._control = control
        self._pipes = pipes
        self._flight = flight
        self._guardian = guardian
        self._visible = visible
        self._log = Log(os.path.join(folder, "log.jsonl"))
        self._open = {fd: stream for stream, fd in enumerate(pipes.read)}
        self._poll = select.poll()
        for fd in [*self._open, control]:
            self._poll.register(fd, select.POLLIN)
        self._end_at = self._force_at = _NEVER
        self._killed = False

    def run(self) -> None:
        """Do it all."""
        facts: dict[str, object] = {"status": None, "signal": None, "started": False}
        try:
            facts.update(self._run_script(os.path.join(self._folder, "command")))
        except CannotRun as e:
            facts.update(status=e.status, started=True, error=str(e))
        end_all()
        self._pipes.close()
        self._drain()
        self._log.close()
        facts.update(killed=self._killed, lost=False, lost_bytes=self._log.lost, time=time.time())
        write_end(self._folder, facts)

    def _run_script(self, command: str) -> dict[str, object]:
        """Run the script to its end."""
        self._hear(0)
        if self._end_at <= time.monotonic():
            self._killed = True
            return {}
        pid = start(self._folder, words(command), (self._pipes.write[0], self._pipes.write[1]), visible=self._visible)
        write_processes(self._folder, guardian=self._guardian, worker=os.getpid(), script=pid)
        try:
            watch = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3, or a sandbox
            watch = -1
        if watch >= 0:
            self._poll.register(watch, select.POLLIN)
        try:
            status = self._watch(pid, _IDLE if watch >= 0 else 0.05)
        finally:
            if watch >= 0:
                self._poll.unregister(watch)
                os.close(watch)
        signalled = os.WIFSIGNALED(status)
        return {
            "status": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "started": True,
        }

    def _watch(self, pid: int, longest: float) -> int:
        """Carry output until the script has ended; its wait status."""
        while True:
            self._hear(self._wait(longest))
            while True:  # the script, and orphans of its
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == pid:
                    return status
                if not ended:
                    break
            self._end()
            self._log.flush()

    def _wait(self, longest: float) -> float:
        """Seconds to the next thing to do."""
        left = max(min(self._end_at, self._force_at) - time.monotonic(), 0.0)
        return min(longest, left, 1.0 if self._log.waits else _IDLE)

    def _hear(self, timeout: float) -> bool:
        """Carry what has come, obey; False if nothing came."""
        came = self._poll.poll(int(timeout * 1000 + 0.999))
        for fd, _ in came:
            if fd in self._open:
                self._carry(fd)
            elif fd == self._control:
                self._obey()
        return bool(came)

    def _carry(self, fd: int) -> None:
        line = self._flight.read(fd, self._open[fd])
        if not line:
            self._poll.unregister(fd)
            os.close(fd)
            del self._open[fd]
            return
        self._log.add(line)
        self._flight.landed()

    def _obey(self) -> None:
        kind, _, seconds = os.read(self._control, CHUNK).partition(b" ")
        if kind == b"kill":
            self._end_at = min(self._end_at, time.monotonic() + float(seconds))

    def _end(self) -> None:
        """SIGTERM to all when the time has come, SIGKILL when their time is over."""
        now = time.monotonic()
        if now >= self._force_at:
            self._force_at = now + 0.1  # again, for those that were being born
            self._to_all(signal.SIGKILL)
        elif now >= self._end_at:
            self._killed = True
            self._end_at, self._force_at = _NEVER, now + PATIENCE
            self._to_all(signal.SIGTERM)
            self._to_all(signal.SIGCONT)

    def _to_all(self, signum: int) -> None:
        for found in below([os.getpid()], processes()):
            send(found, signum)

    def _drain(self) -> None:
        """Read what is left. Nobody should hold the pipes any more; whoever does will not be waited for."""
        self._poll.unregister(self._control)
        until = time.monotonic() + 60
        while self._open and self._hear(_DRAIN) and time.monotonic() < until:
            pass
