"""A master without HTTP: the real store and service, over scripted trials; and how to kill it between two commits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from sqlalchemy.orm import Session

from det_core.master._options import Options
from det_core.master.api import create_app
from det_core.master.engines import Pool
from det_core.master.service import ServiceState, _checkpoints, _create, _lifecycle, _queries
from det_core.master.service._logs import LogQuery, open_log
from det_core.master.store import Store
from det_core.protocol.records import LogView
from support import schema
from support.master_records import RecordReader, parse_answer
from support.scripted_trials import Script, ScriptedTrials, Trial

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from det_core.protocol.records import CheckpointView, ExperimentView, TrialView

T = TypeVar("T")
MAX_LINES = 1000
TOKEN = "the-user's-own-secret-token"


class DyingStore:
    """A store whose master dies at its N-th write: before it, or after it without hearing of it.

    Args:
        store: the real one.
        at: which write; 0: none.
        after: whether the write itself is still done.
    """

    def __init__(self, store: Store, at: int = 0, *, after: bool = False) -> None:
        self._store, self._at, self._after = store, at, after
        self.writes = 0
        self.dead = asyncio.Event()

    async def write(self, work: Callable[[Session], T]) -> T:
        """Write as the store does, until death."""
        await self._unless_dead()
        self.writes += 1
        if self.writes == self._at:
            if self._after:
                await self._store.write(work)
            self.dead.set()
        await self._unless_dead()
        answer = await self._store.write(work)
        await self._unless_dead()
        return answer

    async def read(self, work: Callable[[Session], T]) -> T:
        """Read as the store does, until death."""
        await self._unless_dead()
        answer = await self._store.read(work)
        await self._unless_dead()
        return answer

    async def read_series(self, work: Callable[[Session], T]) -> T:
        """Read series as the store does, until death."""
        return await self.read(work)

    async def _unless_dead(self) -> None:
        if self.dead.is_set():
            await asyncio.get_running_loop().create_future()


class Bench:
    """One home folder, one store, one set of scripted trials, and one service after the other.

    Attributes:
        engine: the trials.
        service: the service that is there.
        deaths: how many there were.
    """

    def __init__(self, folder: Path, script: Script, slots: int, **settings: Any) -> None:
        schema.place(folder / "master.db")
        self.store = Store.open(f"sqlite:///{folder / 'master.db'}")
        self.settings = Options(home=folder, **settings)
        self.engine = ScriptedTrials(script, Pool(slots))
        self.deaths = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, *, at: int = 0, after: bool = False) -> None:
        """Start a service that dies at its N-th write; 0: it does not."""
        before = asyncio.all_tasks()
        self.dying = DyingStore(self.store, at, after=after)
        self.service = ServiceState(self.dying, self.engine, self.settings)  # type: ignore[arg-type]
        starting = asyncio.ensure_future(_lifecycle.start(self.service))
        dead = asyncio.ensure_future(self.dying.dead.wait())
        await asyncio.wait([starting, dead], return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if starting.done():
            starting.result()
            self.engine.attend(self.service)
        else:
            starting.cancel()
        del before

    async def die(self) -> None:
        """Kill the service: nothing that it has begun goes on."""
        self.deaths += 1
        self.engine.abandon()
        self.dying.dead.set()
        for task in [t for t in asyncio.all_tasks() if t.get_name().startswith("det_core master")]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.store.write(lambda conn: None)  # what it had under way is done, or not, before the next one looks

    async def close(self) -> None:
        """Stop everything."""
        await self.engine.stop()
        await _lifecycle.stop(self.service)
        await self.store.close()

    async def do(self, call: Callable[[ServiceState], Awaitable[T]]) -> T:
        """Ask the service as a person would: again when it has died meanwhile, and somebody started it."""
        while True:
            answer = asyncio.ensure_future(call(self.service))
            dead = asyncio.ensure_future(self.dying.dead.wait())
            try:
                await asyncio.wait([answer, dead], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                await self.revive()
            finally:
                answer.cancel()
                dead.cancel()

    async def revive(self) -> None:
        """Start the service again if it is dead."""
        if self.dying.dead.is_set():
            await self.die()
            await self.start()

    async def ended(self, experiment_id: int) -> str:
        """Wait for an experiment's end, over the deaths of the service; returns its state."""

        while True:
            view = await self.do(lambda s: _queries.wait(s, experiment_id, 30))
            if view.end_time is not None:
                return view.state

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something is so."""
        while not condition():
            await asyncio.sleep(0.001)

    async def create(self, searcher: dict[str, Any], **config: Any) -> int:
        """Create an experiment; returns its id."""
        text = json.dumps(config_of(searcher, **config))
        created = await _create.create_experiment(self.service, text)
        return created.id

    async def log(self, trial_id: int, **query: Any) -> list[LogView]:
        """Return lines of a trial's log, by the fields of a LogQuery."""
        reader = await open_log(self.service, LogQuery(**query), trial_id=trial_id)
        lines = await reader.read(MAX_LINES, 30.0)
        while lines and not reader.is_over and not query.get("follow"):
            lines += await reader.read(MAX_LINES, 30.0)
        return lines

    def reader(self, experiment_id: int) -> RecordReader:
        """Return a reader of an experiment's record."""

        async def ask(path: str) -> Any:
            # A service may die after the end of an experiment, too: at its next write, as when it deletes checkpoints.
            return await self.do(lambda service: ask_app(service, path))

        return RecordReader(ask, self.settings.home / "master.db", experiment_id)

    async def record(self, experiment_id: int) -> dict[str, Any]:
        """Return the record of an experiment in a form that two runs can be compared by."""
        return await self.reader(experiment_id).record()

    async def check_replay(self, experiment_id: int) -> None:
        """Make sure that the recorded events give the recorded decisions, and that nothing is lost or doubled."""
        await self.reader(experiment_id).check_replay()


@asynccontextmanager
async def bench(folder: Path, script: Script, slots: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    """Yield a bench with a running service; stop everything at the end."""
    made = Bench(folder, script, slots, **settings)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def config_of(searcher: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration with that searcher."""
    return {
        "name": "scripted",
        "entrypoint": "true",
        "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "reproducibility": {"experiment_seed": 7},
        "searcher": {"metric": "loss", **searcher},
        "checkpoint_storage": {"save_trial_best": 0, "save_trial_latest": 0, "save_experiment_best": 0},
        **more,
    }


def loss(hparams: Any, step: int) -> float:
    """Return the metric of a trial of these hyperparameters at a step."""
    return abs(hparams["lr"] - 0.3) + 1.0 / (1 + step)


async def deaf(trial: Trial) -> int:
    """Do nothing until it is killed."""
    await asyncio.Event().wait()
    return 0


async def train(trial: Trial) -> int:
    """Train as a good script does: report, look whether to stop, save, say what is done."""
    step = trial.spec.steps_completed
    while (length := await trial.operation()) is not None:
        while step < length:
            step += 1
            await trial.report("training", step, loss=loss(trial.spec.hparams, step))
            if await trial.should_preempt():
                await trial.checkpoint(step)
                await trial.acknowledge()
                return 0
        measured = loss(trial.spec.hparams, step)
        await trial.report("validation", step, loss=measured)
        await trial.checkpoint(step)
        await trial.complete(length, measured)
    await trial.acknowledge()
    return 0


async def experiments_of(service: ServiceState, **filters: Any) -> list[ExperimentView]:
    """Return the experiments that match."""
    records, _ = await _queries.find_experiments(service, **filters)
    return records


async def checkpoints_of(service: ServiceState, experiment_id: int) -> list[CheckpointView]:
    """Return the checkpoints of an experiment, newest first."""
    records, _ = await _checkpoints.page(service, 1000, 0, experiment_id=experiment_id)
    return records


async def trials_of(service: ServiceState, experiment_id: int) -> list[TrialView]:
    """Return the trials of an experiment by their IDs."""
    records, _ = await _queries.find_trials(service, experiment_id)
    return records


@cache
def _app() -> FastAPI:
    return create_app(None, TOKEN)  # type: ignore[arg-type]  # each request has the service of its bench


async def ask_app(service: ServiceState, path: str) -> Any:
    """Return what the master's API answers to a GET, as :class:`RecordReader` wants it; there are no sockets."""
    app, sent = _app(), []
    app.state.service = service
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/api/v1/{path}",
        "query_string": query.encode(),
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
    }

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] == 200, text
    return parse_answer(text)
