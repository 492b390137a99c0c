"""Waiting for what processes do, without a clock, and ports that nobody else is given."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Process(Protocol):
    """Common interface of ``subprocess.Popen`` and :class:`support.warm.Started`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit status."""


def suspend(pid: int) -> None:
    """Stop a process, and wait until each of its threads stands still: one may go on until another has the signal."""
    os.kill(pid, signal.SIGSTOP)

    def stands(thread: str) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
        return True

    until(lambda: all(map(stands, os.listdir(f"/proc/{pid}/task"))))


def until(look: Callable[[], T | None], why: Callable[[], Any] | None = None, *, of: Process | None = None) -> T:
    """Wait until ``look`` returns a true value, and return that.

    The only limit is that of the test, pytest-timeout's.

    Args:
        look: asked again and again, first every two milliseconds, later every fifty.
        why: what to show where it does not come to pass, such as an output.
        of: the process that is to bring it about; its end ends the wait.
    """
    pause = 0.002
    try:
        while not (found := look()):
            if of is not None and of.poll() is not None:
                if found := look():
                    break
                raise AssertionError(f"process {of.pid} has ended with status {of.poll()} before it happened")
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)
    except BaseException:
        if why is not None:
            print(why())
        raise
    return found


def threads_in(function: str) -> int:
    """Return the number of this process's threads inside a function of that name."""
    found = 0
    for frame in sys._current_frames().values():
        walk: FrameType | None = frame
        while walk is not None and walk.f_code.co_name != function:
            walk = walk.f_back
        found += walk is not None
    return found


def seconds_in_the_queue(pid: int) -> float:
    """Return the time that all threads of a process were ready to run without a processor (``/proc/PID/schedstat``).

    What a promised bound on elapsed time is measured less, on a machine that has much else to do.
    """
    waited = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


class _Ports:
    """A block of ports that no other test process of this machine draws from, locked as long as this one lives."""

    FIRST, SIZE, BLOCKS = 10_000, 200, 40  # below those that masters pick from, and those lent to outgoing connections

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"det-core-test-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        for block in range(self.BLOCKS):
            self._lock = os.open(folder / str(block), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            os.close(self._lock)
        else:
            raise AssertionError(f"{self.BLOCKS} test processes run already")
        self._first, self._next = self.FIRST + block * self.SIZE, 0

    def draw(self) -> int:
        """Return the next free port of the block."""
        for _ in range(self.SIZE):
            port = self._first + self._next % self.SIZE
            self._next += 1
            with contextlib.suppress(OSError), socket.socket() as s:
                s.bind(("127.0.0.1", port))
                return port
        raise AssertionError(f"ports {self._first} to {self._first + self.SIZE - 1} are all in use")


_ports: _Ports | None = None


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1 that no other test process is given before it is used."""
    global _ports
    if _ports is None:
        _ports = _Ports()
    return _ports.draw()
