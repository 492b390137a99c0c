"""Watching one allocation of this machine from its launch, or its adoption, until no process of it is left."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from det_core import _clock
from det_core._standalone.processes import descendants, send, start_time
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._protocol import ExitReport, Listener
from det_core.master.engines._supervisor._program import GRACE_PERIOD, boot_id
from det_core.master.engines._verdict import Files, Seen, verdict
from det_core.master.scheduler import Cause

logger = logging.getLogger("det_core")
RETRY_INTERVAL = 1.0
OVERDUE_TIMEOUT = GRACE_PERIOD + 8.0
"""Seconds after which a supervisor that was ordered to end is itself killed."""
_POLL_INTERVAL = 0.2
_REAP_TIMEOUT = 2.0
"""Seconds between the release of its lock and the end of a supervisor."""
_HUNT_TIMEOUT = 10.0


class Watch:
    """One allocation of this machine.

    Args:
        allocation_id: Its ID.
        folder: Its folder.

    Attributes:
        pid: Process ID of its supervisor, if that is a child of this process.
        seen: What was in the way of its start, if anything was.
        over: How it ended, once that is known.
    """

    def __init__(self, allocation_id: str, folder: AllocationFolder) -> None:
        self.allocation_id = allocation_id
        self.folder = folder
        self.pid: int | None = None
        self.seen: Seen | None = None
        self.over: ExitReport | None = None
        self._asked_at = math.inf

    @property
    def asked(self) -> bool:
        """Whether the engine wants it to be dead by now."""
        return _clock.monotonic() >= self._asked_at

    def kill(self, grace: float = 0.0) -> None:
        """Have it killed in ``grace`` seconds."""
        # An order only ever comes sooner: a kill shortens the time that a preemption left.
        self._asked_at = min(_clock.monotonic() + grace, self._asked_at)
        self.write_order()

    def write_order(self) -> None:
        """Write the order to end, if there is one, into its folder, if there is one."""
        if self._asked_at < math.inf and self.folder.path.is_dir():
            try:
                self.folder.order_kill(self._asked_at - _clock.monotonic())
            except OSError as e:  # a full disk: it is killed when it is overdue
                logger.warning("allocation %s: cannot write the order to end: %s", self.allocation_id, e)

    async def run(self, listener: Listener) -> ExitReport:
        """Wait until it has ended, and hand over what it left to ``listener``."""
        if self.pid is None and self.folder.is_live:
            await self._catch_up(listener)
        await self.end()
        # After the last process: nothing is added to the journals any more.
        for restart, rank, records in self.folder.read_journals():
            while True:
                try:
                    await listener.journal(self.allocation_id, rank, records, restart)
                    break
                except Exception as e:
                    logger.warning("allocation %s: its journal was not taken: %s", self.allocation_id, e, exc_info=e)
                await asyncio.sleep(RETRY_INTERVAL)
        files = await asyncio.to_thread(Files.read, self.folder)
        seen = self.seen
        if seen is None and self.pid is not None:
            seen = Seen(Cause.LOST, "its supervisor was killed")
        return verdict(files, seen, self.asked, _clock.now())

    async def end(self) -> None:
        """Wait until it has ended and no process of it is left."""
        await self._until_unlocked()
        await self._reap()
        # A supervisor that wrote how it ended has ended all its descendants before.
        if self.folder.exit() is None and (count := await asyncio.to_thread(_kill_processes, self.folder)):
            logger.warning("allocation %s: its supervisor was killed; ended %d processes", self.allocation_id, count)

    async def _catch_up(self, listener: Listener) -> None:
        """Hand over what an adopted allocation has reported while no master was there; it ships that itself later."""
        try:
            for restart, rank, records in self.folder.read_journals(alive=True):
                await listener.reports(self.allocation_id, rank, records, restart)
        except Exception as e:
            logger.warning("allocation %s: what it has reported comes later: %s", self.allocation_id, e)

    async def _until_unlocked(self) -> None:
        """Wait until its supervisor has released the lock, or never held it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        fd = _open_process(self.pid or self.folder.processes().get("supervisor", (0, None))[0])

        def on_exit() -> None:
            loop.remove_reader(fd)  # it stays readable
            ended.set()

        if fd >= 0:
            loop.add_reader(fd, on_exit)
        try:
            while self.folder.is_live:
                if _clock.monotonic() > self._asked_at + OVERDUE_TIMEOUT:  # stopped, or stuck
                    self._asked_at = _clock.monotonic()
                    _kill_supervisor(self.folder)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), _POLL_INTERVAL)
                    await asyncio.sleep(0.005)  # what it was about to start may hold the lock for a moment
        finally:
            if fd >= 0:
                loop.remove_reader(fd)
                os.close(fd)

    async def _reap(self) -> None:
        """Collect the supervisor. If it outlives the lock of its folder, the folder was removed: then kill it."""
        if self.pid is None:
            return
        deadline = _clock.monotonic() + _REAP_TIMEOUT
        with suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if _clock.monotonic() > deadline:
                    logger.error("allocation %s: its folder was removed while it ran: killing it", self.allocation_id)
                    os.kill(self.pid, signal.SIGKILL)
                    deadline = math.inf
                await asyncio.sleep(0.005)


def _open_process(pid: int) -> int:
    """Return a descriptor that is readable once a process has ended; -1 without one: the lock must do."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _kill_supervisor(folder: AllocationFolder) -> None:
    """Kill the supervisor of an allocation, if it still is the process that was written down."""
    known = folder.processes()
    pid, started = known.get("supervisor", (0, None))
    if pid and known.get("boot") == boot_id() and start_time(pid) == started:
        send(pid, signal.SIGCONT)
        send(pid, signal.SIGKILL)


def _kill_processes(folder: AllocationFolder) -> int:
    """Kill what a supervisor that was killed has left, until nothing is; return how many processes there were."""
    # Again and again: one that was found may have forked before it died.
    killed: set[int] = set()
    deadline = time.monotonic() + _HUNT_TIMEOUT
    while (found := find_processes(folder)) and time.monotonic() < deadline:
        killed |= {pid for pid in found if send(pid, signal.SIGKILL)}
        time.sleep(0.005)
    return len(killed)


def find_processes(folder: AllocationFolder) -> set[int]:
    """Return the processes of an allocation.

    They are known by a variable that they were born with, by their session, or by descent from one that is.
    """
    variable = f"DET_CORE_INFO_DIR={folder.path / 'info'}".encode()
    known = folder.processes()
    script, started = known.get("script", (0, None))
    # The number may be another process's by now.
    if known.get("boot") != boot_id() or start_time(script) not in (None, started):
        script = 0
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    own = {pid for pid in pids if _is_own(pid, variable, script)}
    return {pid for pid in own | descendants(own) if pid != os.getpid() and start_time(pid) is not None}


def _is_own(pid: int, variable: bytes, session: int) -> bool:
    try:
        if session and os.getsid(pid) == session:
            return True
        # Of a process of another user this raises PermissionError, an OSError.
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
