"""The engine that runs allocations as processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from det_core import _clock
from det_core._env import child_environment
from det_core.master._errors import Conflict, MasterError, Stopping
from det_core.master.engines import _supervisor
from det_core.master.engines._archive import unpack_archive
from det_core.master.engines._environment import HOOK, create_venv, hook_command, run_variables, write_info
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._protocol import Claim, Ended, ExitReport, Listener, Ticket
from det_core.master.engines._slots import Slots
from det_core.master.engines._verdict import Seen
from det_core.master.engines._watch import RETRY_INTERVAL, Watch
from det_core.master.scheduler import Cause, Pool

logger = logging.getLogger("det_core")


class LocalEngine:
    """Runs each allocation under a supervisor of its own, which outlives the master.

    Args:
        home: Home folder of the master; allocations lie in ``master/allocations`` below it.
        slots: Slots of this machine.
    """

    def __init__(self, home: Path, slots: Slots) -> None:
        self._home = home.absolute()
        self._folders = self._home / "master" / "allocations"
        self._slots = slots
        self._name = secrets.token_hex(8)
        self._listener: Listener | None = None
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[Ended] = asyncio.Queue()

    @property
    def pool(self) -> Pool:
        """Slots of this machine."""
        return Pool(self._slots.count)

    async def recover(self, known: Mapping[str, str | None], listener: Listener, kept: Mapping[str, int]) -> None:
        """Begin; see :class:`~det_core.master.engines.Engine`."""
        self._listener = listener
        folders: dict[str, AllocationFolder] = {}
        with suppress(FileNotFoundError), os.scandir(self._folders) as entries:
            folders = {entry.name: AllocationFolder(Path(entry.path)) for entry in entries if entry.is_dir()}
        others = folders.keys() - known.keys()
        ended = [folders[name] for name in others if _is_kept(name, kept)]
        cleanup = asyncio.to_thread(_try_each, AllocationFolder.remove_all_but_log, ended)
        self._tasks[""] = asyncio.create_task(cleanup, name="det_core engine: what an earlier one did not delete")
        await asyncio.gather(*(self._discard(folders[name]) for name in others if not _is_kept(name, kept)))
        for allocation_id in known:
            watch = self._watches[allocation_id] = Watch(allocation_id, self._folder(allocation_id))
            if allocation_id not in folders or watch.folder.has_only_log:
                watch.over = ExitReport(None, None, Cause.NOT_STARTED, "it was never launched", time=_clock.now())
                self._events.put_nowait(Ended(allocation_id, watch.over))
            else:
                self._follow(watch)

    async def launch(self, ticket: Ticket) -> None:
        """Start an allocation; see :class:`~det_core.master.engines.Engine`."""
        allocation_id = ticket.allocation_id
        if allocation_id in self._watches:
            raise ValueError(f"allocation {allocation_id} was launched before")
        if unknown := set(ticket.slot_ids) - set(self.pool.slot_ids):
            raise ValueError(f"allocation {allocation_id}: slot {min(unknown)} is not one of {self._slots.count}")
        folder = self._folder(allocation_id)
        # Before the first await: a kill may come while the folder is laid out.
        watch = self._watches[allocation_id] = Watch(allocation_id, folder)
        try:
            await asyncio.to_thread(folder.create, ticket)
            claim = await self._claim(ticket)
            if ticket.context is not None:
                await self._unpack(ticket.context, folder.path / "work")
            await asyncio.to_thread(self._lay_out, folder, ticket, claim)
            # It was killed meanwhile.
            if watch.asked:
                folder.write_exit(cause=Cause.CANCELLED, error="it was killed before it began")
            else:
                watch.pid = await asyncio.to_thread(_spawn, folder)
                watch.write_order()
        except Exception as e:
            logger.warning("allocation %s cannot be started: %s", allocation_id, e)
            watch.seen = Seen(_cause(e), f"it cannot be started: {e}")
            with suppress(OSError):  # the next master will report that it did not begin
                folder.write_exit(cause=watch.seen.cause, error=watch.seen.detail)
        self._follow(watch)

    async def kill(self, allocation_id: str) -> None:
        """End an allocation now."""
        await self.terminate(allocation_id, 0.0)

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """Kill an allocation in ``grace`` seconds, unless it has ended by then."""
        watch = self._watches.get(allocation_id)
        if watch is not None and watch.over is None:
            watch.kill(max(grace, 0.0))

    async def events(self) -> AsyncIterator[Ended]:
        """Yield what has ended, as it happens."""
        while True:
            yield await self._events.get()

    async def forget(self, allocation_id: str) -> None:
        """Delete what is kept of an allocation that has ended, except its log.

        Raises:
            ValueError: If it still runs.
        """
        watch = self._watches.get(allocation_id)
        if watch is None:
            return
        if watch.over is None:
            raise ValueError(f"allocation {allocation_id} has not ended")
        del self._watches[allocation_id]
        await asyncio.to_thread(_try_each, AllocationFolder.remove_all_but_log, [watch.folder])

    async def close(self) -> None:
        """Stop watching. What runs goes on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _folder(self, allocation_id: str) -> AllocationFolder:
        return AllocationFolder(self._folders / allocation_id)

    def _follow(self, watch: Watch) -> None:
        name = f"det_core engine: {watch.allocation_id}"
        self._tasks[watch.allocation_id] = asyncio.create_task(self._see_through(watch), name=name)

    async def _see_through(self, watch: Watch) -> None:
        assert self._listener is not None, "recover() comes first"
        while watch.over is None:
            try:
                watch.over = await watch.run(self._listener)
            except Exception as e:  # such as too many open files: what it does meanwhile is in its folder
                logger.error("allocation %s cannot be watched now: %s", watch.allocation_id, e, exc_info=e)
                await asyncio.sleep(RETRY_INTERVAL)
        del self._tasks[watch.allocation_id]
        self._events.put_nowait(Ended(watch.allocation_id, watch.over))

    async def _discard(self, folder: AllocationFolder) -> None:
        """End and delete an allocation that nobody knows."""
        logger.warning("allocation %s is in no record: ended and deleted", folder.path.name)
        watch = Watch(folder.path.name, folder)
        watch.kill()
        await watch.end()
        await asyncio.to_thread(_try_each, AllocationFolder.remove, [folder])

    async def _claim(self, ticket: Ticket) -> Claim:
        """Claim an allocation, again and again while the master can neither grant nor refuse it."""
        assert self._listener is not None, "recover() comes first"
        while True:
            try:
                return await self._listener.claim(ticket.allocation_id, 0, ticket.code, self._name)
            except MasterError:
                raise
            except Exception as e:
                logger.warning("allocation %s cannot be claimed now: %s", ticket.allocation_id, e)
            await asyncio.sleep(RETRY_INTERVAL)

    async def _unpack(self, digest: str, work: Path) -> None:
        assert self._listener is not None, "recover() comes first"
        with await self._listener.open_context(digest) as context:
            await asyncio.to_thread(unpack_archive, context, work)

    def _lay_out(self, folder: AllocationFolder, ticket: Ticket, claim: Claim) -> None:
        """Write all that the supervisor needs."""
        write_info(ticket, claim, folder.path, self._slots)
        command = ticket.command
        environment = run_variables(ticket, claim, folder.path, self._home, self._slots)
        if (folder.path / "work" / HOOK).is_file():
            command = hook_command(command)
            environment = create_venv(folder.path / "venv", environment)
        folder.write_start(command, environment)


def _cause(error: Exception) -> Cause:
    """Return why an allocation cannot be started."""
    if isinstance(error, Conflict):
        return Cause.CANCELLED
    # What a ticket says stays as it is; a disk or an interpreter may be there at the next try.
    if isinstance(error, (ValueError, MasterError)) and not isinstance(error, Stopping):
        return Cause.REFUSED
    return Cause.NOT_STARTED


def _spawn(folder: AllocationFolder) -> int:
    """Start the supervisor, in a session of its own; it holds the folder's lock from before it is born."""
    errors = folder.path / "supervisor.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    arguments = _supervisor.command(str(folder.path))
    with folder.lock() as lock:
        return os.posix_spawn(
            arguments[0],
            arguments,
            child_environment(),
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, lock, _supervisor.LOCK),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(errors), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )


def _is_kept(allocation_id: str, kept: Mapping[str, int]) -> bool:
    task_id, _, run = allocation_id.rpartition(".")
    return run.isdecimal() and int(run) <= kept.get(task_id, -1)


def _try_each(delete: Callable[[AllocationFolder], None], folders: Sequence[AllocationFolder]) -> None:
    for folder in folders:
        try:
            delete(folder)
        except OSError as e:
            logger.warning("%s cannot be deleted: %s", folder.path, e)
