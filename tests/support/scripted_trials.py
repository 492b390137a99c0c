"""An engine whose trials are coroutines that behave as told, and that outlives any number of masters.

A script is an async function of a :class:`Trial`; what it returns is its exit status, and what it raises an exit with
status 1. It speaks to whichever service is there, and asks again when one has died, as the SDK does.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from det_core.master._errors import Fenced, Stopping
from det_core.master.engines import Cause, Ended, Event, ExitReport, Listener, Pool, Ticket
from det_core.master.service import ServiceState, _allocations, _checkpoints, _operations, _reports
from support.scripted_engine import Launched

T = TypeVar("T")

Script = Callable[["Trial"], Awaitable[int | None]]


@dataclass(eq=False)
class Trial:
    """One allocation, as its script sees it."""

    spec: Launched
    engine: ScriptedTrials
    seq: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, call: Callable[[ServiceState], Awaitable[T]]) -> T:
        """Ask the service that is there; once more when it dies meanwhile."""
        while True:
            service = await self.engine.service()
            answer = asyncio.ensure_future(call(service))
            gone = asyncio.ensure_future(self.engine.gone())
            try:
                await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and not isinstance(answer.exception(), Stopping):
                    return answer.result()
                await gone
            finally:
                answer.cancel()
                gone.cancel()

    async def operation(self) -> int | None:
        """Return the length to train to, or None without an operation."""
        found = await self.ask(
            lambda s: _operations.current(s, self.spec.trial_id, allocation_id=self.spec.allocation_id)
        )
        return None if found["completed"] else found["length"]

    async def report(self, group: str, step: int, **metrics: Any) -> None:
        """Journal a row, and ship it."""
        self.record("metrics", group=group, steps_completed=step, metrics=metrics)
        await self.ship()

    def record(self, kind: str, **content: Any) -> dict[str, Any]:
        """Journal a record."""
        made = {"kind": kind, "seq": self.seq, "time": 1.0 + self.seq, **content}
        self.seq += 1
        self.records.append(made)
        return made

    async def ship(self) -> None:
        """Send the journal so far; the service takes what is new."""
        await self.ask(lambda s: _reports.journal(s, self.spec.trial_id, self.spec.trial_run_id, 0, self.records))

    async def complete(self, length: int, metric: float) -> None:
        """Say that the operation is done."""
        self.record("operation", body={"length": length, "searcher_metric": metric})
        own = self.spec.allocation_id
        await self.ask(lambda s: _operations.complete(s, self.spec.trial_id, length, metric, allocation_id=own))

    async def checkpoint(self, step: int) -> str:
        """Register a checkpoint, which is named by its trial and step."""
        uuid = f"{self.spec.task_id}-{self.spec.trial_run_id}-{step}"
        await self.ask(
            lambda s: _checkpoints.register(
                s,
                uuid,
                self.spec.task_id,
                allocation_id=self.spec.allocation_id,
                metadata={"steps_completed": step},
                resources={"state": 1},
                report_time=float(step),
            )
        )
        return uuid

    async def should_preempt(self, timeout: float = 0.0) -> bool:
        """Return whether to stop."""
        return await self.ask(lambda s: _allocations.poll(s, self.spec.allocation_id, timeout))

    async def acknowledge(self) -> None:
        """Say that the exit is near."""
        await self.ask(lambda s: _allocations.acknowledge(s, self.spec.allocation_id))

    async def early_exit(self, reason: str = "INVALID_HP") -> None:
        """Give up."""
        own = self.spec.allocation_id
        await self.ask(lambda s: _operations.give_up(s, self.spec.trial_id, reason, allocation_id=own))


@dataclass
class ScriptedTrials:
    """Engine that runs a script for every allocation.

    Attributes:
        script: what every allocation runs.
        pool: where it runs them.
        launched: what was launched, in order.
        most: the most that ran at once.
        graces: seconds that each allocation was given to end.
        listener: takes what dead allocations left, while a service is attached.
    """

    script: Script
    pool: Pool = field(default_factory=lambda: Pool(1))
    launched: list[Launched] = field(default_factory=list)
    most: int = 0
    graces: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.listener: Listener | None = None
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._trials: dict[str, Trial] = {}
        self._ended: dict[str, ExitReport] = {}
        self._service: asyncio.Future[ServiceState] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # What the trials see of the master.

    def attend(self, service: ServiceState) -> None:
        """Attach a service."""
        self._gone.clear()
        self._service.set_result(service)

    def abandon(self) -> None:
        """Detach the service, which has died: pending requests go to the next one."""
        if self._service.done():  # or somebody waits for the next one already, and would wait for ever
            self._service = asyncio.get_running_loop().create_future()
        self.listener = None
        self._gone.set()

    async def service(self) -> ServiceState:
        """Return the attached service; wait for one if there is none."""
        return await asyncio.shield(self._service)

    async def gone(self) -> None:
        """Wait until the service that is there has died."""
        await self._gone.wait()
        await asyncio.shield(self._service)

    @property
    def running(self) -> list[str]:
        """The allocations that have not ended."""
        return list(self._running)

    def kill_process(self, allocation_id: str, *, signal: int = 9) -> None:
        """Kill the process of an allocation, as ``kill -9`` does."""
        self._end(allocation_id, ExitReport(None, signal, Cause.NONE, f"killed by signal {signal}"))

    def lose(self, allocation_id: str, cause: Cause = Cause.LOST) -> None:
        """Lose an allocation: its supervisor was killed, or its machine is gone."""
        self._end(allocation_id, ExitReport(None, None, cause, "its supervisor was killed"))

    async def stop(self) -> None:
        """End all that runs."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()

    # The engine.

    async def recover(self, known: Mapping[str, str | None], listener: Listener, kept: Mapping[str, int]) -> None:
        """Adopt what runs and is known; kill what is not known; say again what has ended."""
        self.listener, self._queue = listener, asyncio.Queue()
        for allocation_id in list(self._running):
            if allocation_id not in known:
                self._end(allocation_id, ExitReport(None, 9, Cause.CANCELLED, "nobody knows it"))
        for allocation_id in known:
            if allocation_id in self._ended:
                self._aside(self._hand_over(allocation_id, listener, self._queue))
            elif allocation_id not in self._running:
                report = ExitReport(None, None, Cause.NOT_STARTED, "it was never launched")
                self._ended[allocation_id] = report
                self._queue.put_nowait(Ended(allocation_id, report))

    async def launch(self, ticket: Ticket) -> None:
        """Claim it, and run the script."""
        assert self.listener is not None
        spec = await Launched.claim(ticket, self.listener)
        assert spec.allocation_id not in {s.allocation_id for s in self.launched}, "launched twice"
        self.launched.append(spec)
        trial = self._trials[spec.allocation_id] = Trial(spec, self)
        self._running[spec.allocation_id] = asyncio.create_task(self._run(trial))
        held = [slot for a in self._running for slot in self._trials[a].spec.slot_ids]
        assert len(held) == len(set(held)), f"a slot is held twice: {held}"
        self.most = max(self.most, len(self._running))

    async def kill(self, allocation_id: str) -> None:
        """End it, as killed by the master."""
        self._end(allocation_id, ExitReport(None, 9, Cause.CANCELLED, "killed by the master"))

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """Kill it in a while."""
        self.graces[allocation_id] = grace
        if allocation_id in self._running and grace < 100:
            report = ExitReport(None, 9, Cause.CANCELLED, "killed by the master after its grace")
            self._timers[allocation_id] = asyncio.get_running_loop().call_later(grace, self._end, allocation_id, report)

    def tell(self, event: Event) -> None:
        """Tell the master what the test says."""
        self._queue.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the allocations that have ended."""
        queue = self._queue
        while True:
            yield await queue.get()

    async def forget(self, allocation_id: str) -> None:
        """Keep nothing of the allocation."""
        self._ended.pop(allocation_id, None)
        self._trials.pop(allocation_id, None)

    async def close(self) -> None:
        """Leave the allocations running."""

    async def _run(self, trial: Trial) -> None:
        try:
            status = await self.script(trial) or 0
            detail = f"exited with status {status}"
        except Fenced as e:
            status, detail = 3, f"fenced: {e}"
        except asyncio.CancelledError:
            raise
        except Exception as e:
            status, detail = 1, f"{type(e).__name__}: {e}"
        self._end(trial.spec.allocation_id, ExitReport(status, None, Cause.NONE, detail, (detail,)))

    def _end(self, allocation_id: str, report: ExitReport) -> None:
        task = self._running.pop(allocation_id, None)
        if task is None:
            return
        if task is not asyncio.current_task():
            task.cancel()
        timer = self._timers.pop(allocation_id, None)
        if timer is not None:
            timer.cancel()
        self._ended[allocation_id] = report
        if self.listener is not None:
            self._aside(self._hand_over(allocation_id, self.listener, self._queue))

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="det_core master: engine of the test")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, allocation_id: str, listener: Listener, queue: asyncio.Queue[Event]) -> None:
        """Give the journal that a dead process left, then tell its end."""
        trial = self._trials.get(allocation_id)
        report = self._ended[allocation_id]
        while trial is not None and trial.records:
            try:
                await listener.journal(allocation_id, 0, trial.records, 0)
                break
            except Stopping:
                return
            except Exception:  # as the real engine: until the master takes it
                traceback.print_exc()
                await asyncio.sleep(0.05)
        queue.put_nowait(Ended(allocation_id, report))
