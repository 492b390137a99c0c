"""Running a search without training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

from det_core.errors import InvalidHP, SearchError
from det_core.search._create import create_search
from det_core.search._events import (
    JSON,
    Action,
    Close,
    Completed,
    Create,
    Event,
    Exited,
    ExitReason,
    Started,
    Stop,
    TrainTo,
    Validated,
)
from det_core.search._search import Search

Objective = Callable[[JSON, int, int], "float | ExitReason"]
"""(hyperparameters, length, number of the trial from 0) -> its metric there, or why it is over. May raise InvalidHP."""
Order = Literal["time", "random"]


@dataclass(slots=True)
class SimulatedTrial:
    """What became of a trial."""

    number: int
    """From 0, in the order of creation."""
    request_id: str
    hparams: JSON
    seed: int
    reports: tuple[tuple[int, float], ...] = ()
    """The lengths at which it was validated, with its metric at each."""
    exited: ExitReason | None = None
    target: int | None = None
    """The length it trains to; None: it trains no more, for now."""
    closed: bool = False
    stopped: bool = False

    @property
    def length(self) -> int:
        """How long it trained."""
        return self.reports[-1][0] if self.reports else 0


@dataclass
class Simulation:
    """What a search did."""

    search: Search
    trials: list[SimulatedTrial] = field(default_factory=list)
    decisions: int = 0
    """How many events the search was told, each of which it answered."""
    units: int = 0
    """How many units were trained in all."""
    time: float = 0.0
    """When the last trial ended, if each unit takes one tick."""
    record: list[tuple[Event, list[Action]]] = field(default_factory=list)
    """Every event with the actions it led to; empty unless asked for."""


def simulate(
    searcher: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    seed: int,
    objective: Objective,
    *,
    slots: int | None = None,
    order: Order = "time",
    record: bool = False,
    search: Search | None = None,
    folder: str | None = None,
) -> Simulation:
    """Run a search to its end with trials that train in no time.

    Args:
        searcher, hyperparameters, seed, folder: as for :func:`create_search`.
        objective: what a trial reports, after how long.
        slots: how many trials train at a time; None: as many as the search wants.
        order: which of the running trials reports next. ``time``: each trains one unit a tick; ``random``: any of them,
            by ``seed``.
        record: whether to keep the record of events and actions.
        search: a search to run instead of a new one, before its first event.

    Raises:
        SearchError: the search failed, or it stands still: no trial is left to train, and it is not over.
    """
    done = Simulation(search or create_search(searcher, hyperparameters, seed, folder=folder))
    _Simulator(done, objective, slots, random.Random(seed) if order == "random" else None, record).run()
    return done


class _Simulator:
    def __init__(
        self, done: Simulation, objective: Objective, slots: int | None, rng: random.Random | None, record: bool
    ) -> None:
        self._done, self._objective, self._slots, self._rng, self._record = done, objective, slots, rng, record
        self._trials: dict[str, SimulatedTrial] = {}
        self._waiting: deque[SimulatedTrial] = deque()
        self._running: list[tuple[float, int, int, SimulatedTrial]] = []
        self._started = 0
        self._stages: list[int] = []
        """The lengths at which trials report on the way, which only a search that validations drive has."""
        if "validated" in done.search.event_kinds:
            self._stages = sorted({rung["length"] for bracket in done.search.rungs() for rung in bracket["rungs"]})

    def run(self) -> None:
        """Until nothing trains any more."""
        self._send(Started())
        self._fill()
        while self._running:
            self._done.time, _, length, trial = heappop(self._running)
            if not trial.stopped:
                self._reach(trial, length)
            self._fill()
        self._done.trials = list(self._trials.values())
        if not self._done.search.over:
            raise SearchError("the search stands still: no trial is left to train, and it is not over")

    def _reach(self, trial: SimulatedTrial, length: int) -> None:
        """A trial has trained ``length`` units."""
        try:
            said = self._objective(trial.hparams, length, trial.number)
        except InvalidHP:
            said = "invalid_hp"
        if isinstance(said, str):
            self._exit(trial, said)
            return
        self._done.units += length - trial.length
        trial.reports += ((length, said),)
        if length == trial.target:
            trial.target = None
            self._send(Completed(trial.request_id, length, said))
            if trial.closed and trial.target is None and trial.exited is None:
                self._exit(trial, "completed")
            return
        self._send(Validated(trial.request_id, length, said))
        if not trial.stopped:
            self._start(trial)

    def _send(self, event: Event) -> None:
        actions = self._done.search.handle(event)
        self._done.decisions += 1
        if self._record:
            self._done.record.append((event, actions))
        closed: list[SimulatedTrial] = []
        for action in actions:
            if isinstance(action, TrainTo):
                trial = self._trials[action.request_id]
                trial.target = action.length
                self._waiting.append(trial)
            elif isinstance(action, Create):
                name = action.request_id
                self._trials[name] = SimulatedTrial(len(self._trials), name, action.hparams, action.seed)
            elif isinstance(action, (Close, Stop)):
                trial = self._trials[action.request_id]
                trial.closed = True
                if isinstance(action, Stop):
                    trial.stopped, trial.target = True, None
                closed.append(trial)
        for trial in closed:
            if trial.target is None and trial.exited is None:
                self._exit(trial, "completed")

    def _exit(self, trial: SimulatedTrial, reason: ExitReason) -> None:
        trial.exited, trial.target = reason, None
        self._send(Exited(trial.request_id, reason))

    def _fill(self) -> None:
        """Start what waits, as far as there are slots."""
        while self._waiting and (self._slots is None or len(self._running) < self._slots):
            trial = self._waiting.popleft()
            if not trial.stopped:
                self._start(trial)

    def _start(self, trial: SimulatedTrial) -> None:
        assert trial.target is not None
        trained = trial.length
        length = next((stage for stage in self._stages if trained < stage < trial.target), trial.target)
        self._started += 1
        end = self._done.time + length - trained if self._rng is None else self._rng.random()
        heappush(self._running, (end, self._started, length, trial))
