"""An engine whose machine does not share the master's folders.

The machine is a local engine with a home of its own. All that it and the master exchange goes over a link that is slow,
loses answers, brings the pieces of files twice and in the wrong order, and can be cut.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from det_core import _clock
from det_core.master._errors import Fenced
from det_core.master.engines import (
    AllocationFolder,
    Cause,
    Claim,
    Ended,
    Event,
    ExitReport,
    Listener,
    LocalEngine,
    Moved,
    Notice,
    Piece,
    Pool,
    Slots,
    Ticket,
)
from det_core.master.engines._delivery import digest, is_appended, pack_exit
from det_core.master.engines._verdict import Files, verdict
from det_core.master.scheduler import Phase

T = TypeVar("T")
PIECE_BYTES = 64 * 1024
WINDOW = 8
"""Pieces of a file that are under way at a time."""
MAX_DELAY = 0.003
LOST_ANSWERS = 0.05


class Link:
    """Network between a machine and the master.

    Args:
        seed: Seed of its delays and losses.
        cut: File that cuts it as long as it exists.
    """

    def __init__(self, seed: int = 0, cut: Path | None = None) -> None:
        self.rng = random.Random(seed)
        self._cut = cut

    @property
    def is_cut(self) -> bool:
        """Whether nothing gets through."""
        return self._cut is not None and self._cut.exists()

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Carry a request and its answer.

        Raises:
            ConnectionError: If the answer is lost.
        """
        while self.is_cut:
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.rng.uniform(0, MAX_DELAY))
        answer = await request()
        if self.is_cut or self.rng.random() < LOST_ANSWERS:
            raise ConnectionError("the answer is lost")
        return answer

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """Carry a request, again until its answer arrives."""
        while True:
            with suppress(ConnectionError):
                return await self.call(request)


class RemoteEngine:
    """Runs allocations elsewhere.

    Args:
        home: Home of the master.
        elsewhere: Directory of the machine.
        slots: Number of its slots.
        link: What is between the two.
        master_url: Where the machine reaches the master; None: where the ticket says.
        time_limit: Seconds that the machine gives each allocation, of which it warns when few are left.
    """

    def __init__(
        self,
        home: Path,
        elsewhere: Path,
        slots: int,
        link: Link | None = None,
        *,
        master_url: str | None = None,
        time_limit: float | None = None,
    ) -> None:
        self._copies = home / "master" / "allocations"
        self._elsewhere = elsewhere
        self._machine = LocalEngine(elsewhere, Slots(slots))
        self._link = link or Link()
        self._master_url = master_url
        self._time_limit = time_limit
        self._runs: dict[str, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    @property
    def pool(self) -> Pool:
        """Slots of the machine."""
        return self._machine.pool

    async def recover(self, known: Mapping[str, str | None], listener: Listener, kept: Mapping[str, int]) -> None:
        """Begin."""
        self._listener = listener
        assert all(ref in (None, _job(allocation_id)) for allocation_id, ref in known.items())
        self._spawn(self._hear_of_ends())
        await self._machine.recover(known, _Relay(self._elsewhere, self._link, listener), kept)
        for path in self._copies.iterdir() if self._copies.exists() else ():
            if path.name not in known:
                AllocationFolder(path).remove_all_but_log()
        for allocation_id in known:
            run = self._run_of(allocation_id)
            run.launched.set()
            self._spawn(self._follow(run))
            with suppress(OSError):
                _, seconds = (run.copy.path / "kill").read_text().split()
                await self.terminate(allocation_id, float(seconds))

    async def launch(self, ticket: Ticket) -> None:
        """Submit an allocation; return once the machine has it."""
        if ticket.allocation_id in self._runs or not set(ticket.slot_ids) <= set(self.pool.slot_ids):
            raise ValueError(f"allocation {ticket.allocation_id} was launched before, or has no such slot")
        run = self._run_of(ticket.allocation_id)
        run.copy.path.mkdir(parents=True, exist_ok=True)
        (run.copy.path / "ticket.json").write_text(replace(ticket, code="").to_json())
        ticket = replace(Ticket.from_json(ticket.to_json()), master_url=self._master_url or ticket.master_url)
        self._events.put_nowait(Moved(ticket.allocation_id, Phase.QUEUED, "Priority", _job(ticket.allocation_id)))
        await self._link.insist(_nothing)
        if _clock.monotonic() >= run.end_at:
            run.copy.write_exit(cause=Cause.CANCELLED, error="it was killed before it began")
        else:
            submitted = asyncio.ensure_future(self._machine.launch(ticket))
            await asyncio.sleep(0)  # from here on it can be killed there
            run.launched.set()
            self._events.put_nowait(Moved(ticket.allocation_id, Phase.STARTING, "1 node"))
            await submitted
            if self._time_limit is not None:
                self._spawn(self._keep_time(ticket, self._time_limit))
        self._spawn(self._follow(run))

    async def kill(self, allocation_id: str) -> None:
        """End an allocation now."""
        await self.terminate(allocation_id, 0.0)

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """Order the machine to end an allocation; the order is kept until it is there."""
        run = self._runs.get(allocation_id)
        if run is not None and run.over is None:
            run.end_at = min(run.end_at, grace + _clock.monotonic())
            run.copy.order_kill(grace)
            self._spawn(self._order_end(run))

    async def events(self) -> AsyncIterator[Event]:
        """Yield what has ended."""
        while True:
            yield await self._events.get()

    async def forget(self, allocation_id: str) -> None:
        """Delete what is kept of an allocation, but for its log."""
        run = self._runs.pop(allocation_id, None)
        if run is not None:
            run.copy.remove_all_but_log()
            _token_file(self._elsewhere, allocation_id).unlink(missing_ok=True)
            while True:
                with suppress(ValueError):  # the machine may learn of the end after the master
                    return await self._machine.forget(allocation_id)
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._machine.close()

    def _run_of(self, allocation_id: str) -> _Run:
        original = AllocationFolder(self._elsewhere / "master" / "allocations" / allocation_id)
        run = _Run(allocation_id, original, AllocationFolder(self._copies / allocation_id))
        self._runs[allocation_id] = run
        return run

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name="det_core master: engine of the test")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear_of_ends(self) -> None:
        async for event in self._machine.events():
            assert isinstance(event, Ended)
            if event.allocation_id in self._runs:
                self._runs[event.allocation_id].report = event.exit

    async def _keep_time(self, ticket: Ticket, limit: float) -> None:
        """Announce the time limit of an allocation as early as its ticket wants."""
        await asyncio.sleep(max(limit - ticket.stop_before, 0.0))
        self._events.put_nowait(Notice(ticket.allocation_id, "its time limit is near", ticket.stop_before))

    async def _order_end(self, run: _Run) -> None:
        await run.launched.wait()
        await self._link.insist(_nothing)
        await self._machine.terminate(run.allocation_id, run.end_at - _clock.monotonic())

    async def _follow(self, run: _Run) -> None:
        """Deliver the files of an allocation until it has ended, and report that."""
        while run.copy.exit() is None:
            token = _token_file(self._elsewhere, run.allocation_id)
            if token.exists():
                await self._deliver(run, token.read_text())
            elif run.report is not None:  # nobody could claim it
                run.over = run.report
                break
            await asyncio.sleep(0.01)
        if run.over is None:
            await self._hand_over(run)
            asked = _clock.monotonic() >= run.end_at
            run.over = verdict(Files.read(run.copy), None, asked, _clock.now())
        self._events.put_nowait(Ended(run.allocation_id, run.over))

    async def _deliver(self, run: _Run, token: str) -> None:
        """Send some pieces of what is new, more or less in order."""
        ended = run.report
        pieces = list(run.pieces())
        pieces += [piece for piece in pieces if self._link.rng.random() < 0.3]
        self._link.rng.shuffle(pieces)
        with suppress(ConnectionError, Fenced):
            for name, offset in pieces:
                run.arrived[name] = await self._send(run, token, Piece(name, run.read(name, offset), offset))
            for name, data in run.whole(ended):
                await self._send(run, token, Piece(name, data, digest=digest(data)))

    async def _send(self, run: _Run, token: str, piece: Piece) -> int:
        return await self._link.call(lambda: self._listener.deliver(run.allocation_id, 0, token, piece))

    async def _hand_over(self, run: _Run) -> None:
        for restart, rank, records in run.copy.read_journals():
            while True:
                try:
                    await self._listener.journal(run.allocation_id, rank, records, restart)
                    break
                except Exception:
                    await asyncio.sleep(0.05)


class _Run:
    """One allocation.

    Attributes:
        report: What the machine says of its end; None before that.
        over: How it ended, once that was reported.
        end_at: When it is to be killed.
        arrived: Sizes of its files in the master's copy, by name.
    """

    def __init__(self, allocation_id: str, original: AllocationFolder, copy: AllocationFolder) -> None:
        self.allocation_id = allocation_id
        self.original = original
        self.copy = copy
        self.launched = asyncio.Event()
        self.report: ExitReport | None = None
        self.over: ExitReport | None = None
        self.end_at = float("inf")
        self.arrived: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files that are sent at offsets."""
        found: dict[str, int] = {}
        for folder in ("log", "journal"):
            path = self.original.path / folder
            for entry in os.scandir(path) if path.is_dir() else ():
                if is_appended(name := f"{folder}/{entry.name}", 0):
                    found[name] = entry.stat().st_size
        return found

    def pieces(self) -> Iterator[tuple[str, int]]:
        """Yield name and offset of the next pieces."""
        for name, size in self.sizes().items():
            begin = self.arrived.get(name, 0)
            for offset in range(begin, size, PIECE_BYTES)[:WINDOW]:
                yield name, offset

    def read(self, name: str, offset: int) -> bytes:
        """Return a piece of a file; empty if it is gone."""
        with suppress(FileNotFoundError), open(self.original.path / name, "rb") as file:
            return os.pread(file.fileno(), PIECE_BYTES, offset)
        return b""

    def whole(self, report: ExitReport | None) -> Iterator[tuple[str, bytes]]:
        """Yield what is sent whole: who runs and, after the end, how it ended."""
        with suppress(FileNotFoundError):
            yield "processes", (self.original.path / "processes").read_bytes()
        if report is not None:
            yield "exit.json", pack_exit(self.original.exit() or _facts(report), self.sizes())


class _Relay:
    """Master, as the machine sees it."""

    def __init__(self, elsewhere: Path, link: Link, master: Listener) -> None:
        self._elsewhere = elsewhere
        self._link = link
        self._master = master

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        """Claim, and keep the token for the next life of the machine's program."""
        claim = await self._link.insist(lambda: self._master.claim(allocation_id, node, code, runner))
        path = _token_file(self._elsewhere, allocation_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(claim.token)
        return claim

    async def open_context(self, digest: str) -> IO[bytes]:
        """Open a context."""
        return await self._link.insist(lambda: self._master.open_context(digest))

    async def deliver(self, *_: object) -> int:
        """Refuse: this engine delivers."""
        raise AssertionError

    async def journal(self, *_: object) -> None:
        """Let it go: the file is delivered."""

    async def reports(self, *_: object) -> None:
        """Let it go."""


def _token_file(elsewhere: Path, allocation_id: str) -> Path:
    return elsewhere / "tokens" / allocation_id


def _job(allocation_id: str) -> str:
    return f"job of {allocation_id}"


async def _nothing() -> None:
    """Ask nothing, which takes as long as any request."""


def _facts(report: ExitReport) -> dict[str, Any]:
    """Return what the machine's program says of an end that no supervisor wrote down."""
    facts = asdict(report)
    return json.loads(
        json.dumps({**facts, "killed": report.cause is Cause.CANCELLED, "started": False, "error": report.detail})
    )
