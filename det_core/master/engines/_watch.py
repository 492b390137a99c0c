"""Watching one allocation from its launch, or its adoption, to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from det_core import _clock
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._hunt import hunt, kill_supervisor
from det_core.master.engines._journals import left
from det_core.master.engines._protocol import ExitReport, Listener
from det_core.master.engines._supervisor._program import GRACE_PERIOD
from det_core.master.engines._verdict import Files, Seen, verdict
from det_core.master.scheduler import Cause

logger = logging.getLogger("det_core")
LOOK = 0.2
"""Seconds between two looks at its lock."""
RETRY = 1.0
REAP_TIMEOUT = 2.0
"""Seconds between the release of its lock and the end of a supervisor."""
OVERDUE = GRACE_PERIOD + 8.0
"""Seconds after which a supervisor that was ordered to end is itself killed."""


class Watch:
    """One allocation of this machine.

    Args:
        allocation_id: its id.
        folder: its folder.

    Attributes:
        pid: its supervisor, if it is a child of this process.
        seen: what was in the way of its start, if anything was.
        over: how it ended, once that was told.
    """

    def __init__(self, allocation_id: str, folder: AllocationFolder) -> None:
        self.allocation_id = allocation_id
        self.folder = folder
        self.pid: int | None = None
        self.seen: Seen | None = None
        self.over: ExitReport | None = None
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        """Whether this engine wants it to be dead by now."""
        return self._asked_at is not None and _clock.monotonic() >= self._asked_at

    def kill(self, grace: float = 0.0) -> None:
        """Have it killed in ``grace`` seconds."""
        at = _clock.monotonic() + grace
        self._asked_at = at if self._asked_at is None else min(at, self._asked_at)
        self.order()

    def order(self) -> None:
        """Write the order to end, if there is one, into its folder, if there is one."""
        if self._asked_at is not None and self.folder.path.is_dir():
            try:
                self.folder.order_kill(self._asked_at - _clock.monotonic())
            except OSError as e:  # a full disk: it is killed when it is overdue
                logger.warning("allocation %s: cannot write the order to end: %s", self.allocation_id, e)

    async def run(self, listener: Listener) -> ExitReport:
        """Wait until it has ended, and hand over what it left to ``listener``."""
        if self.pid is None and self.folder.is_live:
            await self._catch_up(listener)
        await self.end()
        for restart, rank, records in left(self.folder):
            args = (self.allocation_id, rank, records, restart)
            await self._hand(lambda args=args: listener.journal(*args))  # type: ignore[misc]
        files = await asyncio.to_thread(Files.read, self.folder)
        seen = self.seen
        if seen is None and self.pid is not None:
            seen = Seen(Cause.LOST, "its supervisor was killed")
        return verdict(files, seen, self.asked, _clock.now())

    async def end(self) -> None:
        """Wait until it has ended and no process of it is left."""
        await self._while_it_lives()
        if self.folder.exit() is None and (count := await asyncio.to_thread(hunt, self.folder)):
            logger.warning("allocation %s: its supervisor was killed; ended %d processes", self.allocation_id, count)

    async def _catch_up(self, listener: Listener) -> None:
        """Hand over what an adopted allocation has reported while no master was there; it ships that itself later."""
        try:
            for restart, rank, records in left(self.folder, alive=True):
                await listener.reports(self.allocation_id, rank, records, restart)
        except Exception as e:
            logger.warning("allocation %s: what it has reported comes later (%s)", self.allocation_id, e)

    async def _while_it_lives(self) -> None:
        ended = asyncio.Event()
        known = self.folder.processes().get("supervisor", (0, None))[0]
        fd = _watched(self.pid or known)
        loop, pause = asyncio.get_running_loop(), 0.005
        if fd is not None:
            loop.add_reader(fd, _once, loop, fd, ended)
        try:
            while self.folder.is_live:
                self._insist()
                if ended.is_set():  # what it was about to start may hold the lock for a moment
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LOOK)
                else:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(ended.wait(), LOOK)
        finally:
            if fd is not None:
                loop.remove_reader(fd)
                os.close(fd)
        await self._reap()

    async def _hand(self, give: Callable[[], Awaitable[None]]) -> None:
        """Hand something over, again and again until it is taken."""
        while True:
            try:
                await give()
                return
            except Exception as e:
                logger.warning("allocation %s: what it says was not taken (%s)", self.allocation_id, e, exc_info=e)
            await asyncio.sleep(RETRY)

    def _insist(self) -> None:
        """Kill a supervisor that was ordered to end and does not: stopped, or stuck."""
        if self._asked_at is None or _clock.monotonic() < self._asked_at + OVERDUE:
            return
        self._asked_at = _clock.monotonic()
        kill_supervisor(self.folder)

    async def _reap(self) -> None:
        """Collect the supervisor. If it outlives the lock of its folder, the folder was removed: then kill it."""
        if self.pid is None:
            return
        deadline = _clock.monotonic() + REAP_TIMEOUT
        with suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if _clock.monotonic() > deadline:
                    logger.error("allocation %s: its folder was removed while it ran: killing it", self.allocation_id)
                    os.kill(self.pid, signal.SIGKILL)
                    deadline = math.inf
                await asyncio.sleep(0.005)


def _watched(pid: int) -> int | None:
    """A descriptor that is readable once a process has ended; None: the lock must do."""
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def _once(loop: asyncio.AbstractEventLoop, fd: int, ended: asyncio.Event) -> None:
    loop.remove_reader(fd)
    ended.set()
