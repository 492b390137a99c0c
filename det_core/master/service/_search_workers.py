"""Searches that may take long, each in a process of its own that is asked one event at a time."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core.errors import DetCoreError
from det_core.master._errors import Invalid
from det_core.master.engines import unpack_archive
from det_core.master.service._access import read_context
from det_core.search import Search, Shutdown, action_from_dict, create_search, event_from_dict
from det_core.search._worker import LENGTH, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Row

    from det_core.config import Experiment
    from det_core.master.service._state import ServiceState
    from det_core.search import Action, Event, Progress

LOG = logging.getLogger("det_core")

SLOW = 5.0
"""Seconds without an answer after which a search is reported as slow."""
START_TIMEOUT = 60.0
"""Maximum wait in seconds for the search of a new experiment to start."""
METHODS = ("custom", "optuna")
"""Searches that may take long: a user's class, and Optuna's samplers, which fit models."""


def has_worker(spec: Experiment) -> bool:
    """Return whether the search of a configuration has a process of its own."""
    return spec.searcher["name"] in METHODS


async def make_search(
    service: ServiceState, spec: Experiment, digest: str | None, context: bytes | None
) -> Search | SearchWorker:
    """Return the search of a configuration before its first event; a worker is open.

    Raises:
        Invalid: If the search does not exist, or the user's method cannot be used.
    """
    try:
        if not has_worker(spec):
            return await asyncio.to_thread(create_search, spec.searcher, spec.hyperparameters, spec.seed)
        worker = await prepare_worker(service, spec, digest, context)
        try:
            await asyncio.wait_for(worker.open(), START_TIMEOUT)
        # Also when the request is cancelled: a process without an owner would never end.
        except BaseException:
            await worker.close()
            raise
        return worker
    except asyncio.TimeoutError:
        raise Invalid(f"searcher: it has not started within {START_TIMEOUT:.0f} s") from None
    except (DetCoreError, ValueError, SearchFailed, SearchDied) as e:
        raise Invalid(f"searcher: {e}") from None


async def prepare_worker(
    service: ServiceState, spec: Experiment, digest: str | None, context: bytes | None = None
) -> SearchWorker:
    """Return a worker that is not open yet; the context directory of a user's class is unpacked for it.

    Args:
        service: State of the service.
        spec: Configuration.
        digest: Digest of the context archive, or None if it is not kept.
        context: The archive itself. Defaults to the one that is kept.
    """
    # Optuna's samplers need no file of the user.
    if not spec.searcher.get("class") or (digest is None and context is None):
        return SearchWorker(spec, None)
    folders = service.settings.home / "master" / "searchers"
    folder = folders / str(digest)
    if digest is not None and folder.exists():
        return SearchWorker(spec, folder)
    if context is None:
        context = await read_context(service, str(digest))
        if context is None:
            return SearchWorker(spec, None)
    # Unpacked aside, as two experiments with the same context may be created at once.
    own = folders / f"draft-{secrets.token_hex(8)}"
    await asyncio.to_thread(unpack_archive, io.BytesIO(context), own)
    if digest is None:
        return SearchWorker(spec, own, temporary=True)
    try:
        own.rename(folder)  # whole, as others may look for it at the same time
    except OSError:
        await asyncio.to_thread(shutil.rmtree, own)
        if not folder.exists():
            raise
    return SearchWorker(spec, folder)


def recall(spec: Experiment, rows: Iterable[Row[Any]]) -> Search:
    """Return a search without a worker as it was: recorded decisions are applied, and none is taken anew."""
    search = create_search(spec.searcher, spec.hyperparameters, spec.seed)
    for row in rows:
        search.apply(event_from_dict(row.event), [action_from_dict(action) for action in row.actions or ()])
    return search


def is_over(row: Row[Any]) -> bool:
    """Return whether a search decided at this event to end."""
    return any(action["kind"] == Shutdown.kind for action in row.actions or ())


class SearchFailed(Exception):
    """A search that raised an error; the message is its text."""


class SearchDied(Exception):
    """A process of a search that ended before it answered; the message says how."""


class SearchWorker:
    """A search in a process of its own; one request at a time.

    Args:
        spec: Configuration of its experiment.
        folder: Directory with the module of a user's class, or None.
        temporary: Whether to remove that directory with the process.

    Attributes:
        experiment_id: Its experiment, once there is one.
        event_kinds: Kinds of events that it is asked; those of all searches until it has started.
        over: Whether it has decided to end.
        is_stopped: Whether nothing is asked of it any more.
    """

    def __init__(self, spec: Experiment, folder: Path | None, *, temporary: bool = False) -> None:
        self.experiment_id: int | None = None
        self.event_kinds = Search.event_kinds
        self.over = False
        self.is_stopped = False
        self._spec = spec
        self._folder = folder
        self._temporary = temporary
        self._process: asyncio.subprocess.Process | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fraction = 0.0
        self._notes: dict[str, Progress] = {}
        self._woken = asyncio.Event()
        self._pending: tuple[float, str] | None = None
        """When the request that has no answer was sent, and what it is."""

    @property
    def is_open(self) -> bool:
        """Whether the process runs and has its search."""
        return self._process is not None

    def progress(self) -> float:
        """Return the fraction of the search that was done at its last answer."""
        if self.over:
            return 1.0
        return self._fraction

    def rungs(self) -> list[dict[str, Any]]:
        """Return no rungs: none of these searches has any."""
        return []

    def remarks(self) -> list[str]:
        """Return what people should know of a search that does not answer."""
        if self._pending is None:
            return []
        began, request = self._pending
        seconds = _clock.monotonic() - began
        if seconds < SLOW:
            return []
        return [f"its search has not answered {request} for {seconds:.0f} s; its trials wait until it does"]

    async def open(self, record: Iterable[tuple[dict[str, Any], Sequence[dict[str, Any]]]] = ()) -> None:
        """Start the process, and create the search as it was after the events and decisions of ``record``.

        Raises:
            SearchFailed: If the search cannot be created, or the user's method fails at the record.
            SearchDied: If the process ended.
        """
        # Modules are found as this process finds them, but for the working directory, which -c puts first.
        code = f"import sys; sys.path[:] = {sys.path!r}; from det_core.search._worker import main; main({os.getpid()})"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-u",  # what the user's method prints is not lost when it is killed
            "-c",
            code,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in a terminal stops the master alone
        )
        if self.is_stopped:  # meanwhile
            self._kill()
        spec = self._spec
        folder = None if self._folder is None else str(self._folder)
        create = [spec.searcher, spec.hyperparameters, spec.seed, folder]
        request = {"create": create, "record": [[event, list(actions)] for event, actions in record]}
        # A long record takes long to encode.
        reply = await self._ask("its start", await asyncio.to_thread(encode, request))
        self.event_kinds = frozenset(reply["event_kinds"])

    async def handle(self, event: Event) -> list[Action]:
        """Return the decisions on an event.

        Raises:
            SearchFailed: If the search failed. Its state may be half-way: close it.
            SearchDied: If the process ended.
        """
        reply = await self._ask(repr(event), encode({"event": event.to_dict()}))
        return [action_from_dict(action) for action in reply["actions"]]

    def note(self, event: Progress) -> None:
        """Have progress that decides nothing handed on, of each trial the newest."""
        self._notes[event.request_id] = event
        self._woken.set()

    def wake(self) -> None:
        """End :meth:`wait`: an event is recorded."""
        self._woken.set()

    async def wait(self) -> None:
        """Wait for the next event; hand on what was noted meanwhile."""
        await self._woken.wait()
        # Before the notes are taken: one that comes later wakes the next wait.
        self._woken.clear()
        notes = [event.to_dict() for event in self._notes.values()]
        self._notes.clear()
        if notes and not self.is_stopped:
            await self._ask("progress", encode({"progress": notes}))

    def conclude(self) -> None:
        """Note that its decision to end is recorded."""
        self.over = True

    def stop(self) -> None:
        """Kill the process, for good; whoever waits for an answer gets :class:`SearchDied`."""
        self.is_stopped = True
        self._woken.set()
        self._kill()

    async def close(self) -> None:
        """Kill the process, and wait until it is gone; :meth:`open` starts another one.

        It is done in a task of its own: asyncio cannot wait again for a pipe whose wait was cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._kill()
        process = self._process
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            with suppress(ConnectionError):
                await process.stdin.wait_closed()
            await process.stdout.read()  # to its end, at which it is closed
            await process.wait()
        self._process = None
        if self._temporary and self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._closing = None

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _ask(self, what: str, request: bytes) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._pending = (_clock.monotonic(), what)
        timer = asyncio.get_running_loop().call_later(SLOW, self._log_slow)
        try:
            self._process.stdin.write(request)
            await self._process.stdin.drain()
            (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            reply: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._process.wait()
            how = f"exited with status {status}"
            if status < 0:
                how = f"was killed by signal {-status}"
            raise SearchDied(f"its process {how}") from None
        finally:
            timer.cancel()
            self._pending = None
        if "error" in reply:
            raise SearchFailed(reply["error"])
        if reply["progress"] is not None:
            self._fraction = reply["progress"]
        return reply

    def _log_slow(self) -> None:
        for remark in self.remarks():
            LOG.warning("experiment %s: %s", self.experiment_id or "to be created", remark)
