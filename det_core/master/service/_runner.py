"""Orders to the engine, in order for each allocation, and its events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core.master._errors import is_content_error
from det_core.master.engines import Cause, Ended, ExitReport, Moved, Ticket
from det_core.master.service import _allocations, _checkpoints, _retention, _tickets, _trials
from det_core.master.store import checkpoints

if TYPE_CHECKING:
    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")
RETRY_INTERVAL = 1.0
"""Seconds until what failed is begun again; they double with each further failure."""
MAX_RETRY_DELAY = 10.0
"""Maximum of these seconds."""


class Runner:
    """Sender of decisions to the engine, and receiver of its events.

    Args:
        service: State of the service.
    """

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._tried: set[str] = set()
        self._last: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recovered = asyncio.Event()

    def watch(self) -> None:
        """Listen to the engine, which has recovered, and send the orders that waited for that."""
        self._recovered.set()
        self.keep_running(self._listen, "engine")

    async def until_recovered(self) -> None:
        """Wait until the engine has recovered, after which decisions are taken."""
        await self._recovered.wait()

    async def stop(self) -> None:
        """Cancel what is under way; the engine itself goes on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tried(self, allocation_id: str) -> bool:
        """Return whether this master has sent the allocation to the engine; else an earlier one may have."""
        return allocation_id in self._tried

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run work in the background until the service stops."""
        task = asyncio.create_task(work, name=f"det_core master: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep_running(self, loop: Callable[[], Awaitable[None]], name: str) -> None:
        """Run a loop until the service stops; when it fails, log that and begin it again."""
        self.spawn(_keep_running(loop, name), name)

    # What is to be done after a commit; none of it waits.

    def launch(self, allocation_id: str, code: str) -> None:
        """Start an allocation that was recorded."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is None:
            return
        # Before the order is sent: from here on a failed start is a failure of the trial.
        self._tried.add(allocation_id)
        ticket = _tickets.write_ticket(self._service, allocation, code)
        self._in_turn(allocation_id, partial(self._launch, ticket))

    def terminate(self, allocation_id: str, grace: float) -> None:
        """Order the engine to kill an allocation in ``grace`` seconds, unless it ends before."""
        self._in_turn(allocation_id, partial(self._service.engine.terminate, allocation_id, grace))

    def kill(self, allocation_id: str) -> None:
        """Order the engine to kill an allocation now."""
        self._in_turn(allocation_id, partial(self._service.engine.kill, allocation_id))

    def forget(self, allocation_id: str) -> None:
        """Order the engine to forget an allocation whose end is recorded."""
        self._tried.discard(allocation_id)
        self._in_turn(allocation_id, partial(self._service.engine.forget, allocation_id))

    def retain(self, experiment_id: int) -> None:
        """Apply the retention of an experiment that has ended."""
        look = partial(_retention.retain, self._service, experiment_id)
        self.keep_running(look, f"checkpoints of experiment {experiment_id}")

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after a delay, if the service still runs then."""
        self.spawn(_later(seconds, act), "timer")

    # How it is done.

    def _in_turn(self, allocation_id: str, work: Callable[[], Awaitable[None]]) -> None:
        before = self._last.get(allocation_id)
        task = self.spawn(self._after(before, work, allocation_id), allocation_id)
        self._last[allocation_id] = task

    async def _after(
        self, before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]], allocation_id: str
    ) -> None:
        try:
            await self._recovered.wait()
            if before is not None:
                # Not awaited itself: its failure is its own, and was logged.
                await asyncio.wait([before])
            await work()
        finally:
            # Another order may have queued behind this one.
            if self._last.get(allocation_id) is asyncio.current_task():
                del self._last[allocation_id]

    async def _launch(self, ticket: Ticket) -> None:
        service = self._service
        try:
            await service.engine.launch(ticket)
        except Exception as e:
            LOG.error("allocation %s could not be started: %s", ticket.allocation_id, e, exc_info=e)
            detail = f"it could not be started: {type(e).__name__}: {e}"
            report = ExitReport(None, None, Cause.NOT_STARTED, detail, time=_clock.now())
            service.actor.post(lambda tx: _trials.ended(service, tx, ticket.allocation_id, report))

    async def _listen(self) -> None:
        async for event in self._service.engine.events():
            if isinstance(event, Ended):
                # Each in a task of its own: a storage or a database may keep one waiting, but not the others.
                self.keep_running(partial(self._take_end, event), f"end of allocation {event.allocation_id}")
            elif isinstance(event, Moved):
                self._service.actor.post(partial(_allocations.move, self._service, event))
            else:
                self._service.actor.post(partial(_allocations.heed, self._service, event))

    async def _take_end(self, event: Ended) -> None:
        """Register the checkpoints that an allocation left, then decide what follows from its end."""
        service = self._service
        saved = False
        try:
            doubt = await _checkpoints.make_up(service, event.allocation_id)
            if doubt is not None:
                await _checkpoints.look_for(service, doubt)
            saved = event.exit.cause is Cause.TIME and await self._has_saved(event.allocation_id)
        except Exception as e:
            if not is_content_error(e):
                raise
            LOG.error("allocation %s: ignoring its checkpoints: %r", event.allocation_id, e, exc_info=e)
        # The engine reports the end again after a restart, as long as this decision is not stored.
        service.actor.post(lambda tx: _trials.ended(service, tx, event.allocation_id, event.exit, saved=saved))

    async def _has_saved(self, allocation_id: str) -> bool:
        """Return whether an allocation saved a checkpoint."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is None:
            return False
        trial_id = allocation.trial.id
        latest = await self._service.store.read(lambda session: checkpoints.latest(session, trial_id))
        # The one that it started from was there before.
        return latest is not None and latest.uuid != allocation.row.latest_checkpoint

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("%s failed", task.get_name(), exc_info=task.exception())


async def _keep_running(loop: Callable[[], Awaitable[None]], name: str) -> None:
    delay = RETRY_INTERVAL
    known = ""
    while True:
        began = _clock.monotonic()
        try:
            await loop()
            return
        except Exception as e:
            cause = f"{type(e).__name__}: {e}"
            if _clock.monotonic() - began > MAX_RETRY_DELAY:  # it ran well meanwhile
                delay = RETRY_INTERVAL
                known = ""
            if cause != known:
                LOG.error("%s failed, beginning it again: %s", name, e, exc_info=e)
            known = cause
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_DELAY)


async def _later(seconds: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    act()
