"""Simulation of a search, without training."""

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
"""Function of hyperparameters, length and the trial's number from 0.

Returns the metric there, or the reason of the trial's exit. May raise InvalidHP.
"""
Order = Literal["time", "random"]


@dataclass(slots=True)
class SimulatedTrial:
    """Record of a simulated trial."""

    number: int
    """Number from 0, in the order of creation."""
    request_id: str
    hparams: JSON
    seed: int
    reports: tuple[tuple[int, float], ...] = ()
    """Lengths at which it was validated, with its metric at each."""
    exited: ExitReason | None = None
    target: int | None = None
    """Length it trains to; None while it has no operation."""
    closed: bool = False
    stopped: bool = False

    @property
    def length(self) -> int:
        """Length it has trained."""
        if not self.reports:
            return 0
        return self.reports[-1][0]


@dataclass
class Simulation:
    """Record of a simulated search."""

    search: Search
    trials: list[SimulatedTrial] = field(default_factory=list)
    decisions: int = 0
    """Number of events that the search answered."""
    units: int = 0
    """Units trained in all."""
    time: float = 0.0
    """Time at which the last trial ended, if each unit takes one tick."""
    record: list[tuple[Event, list[Action]]] = field(default_factory=list)
    """Every event with its actions; empty unless requested."""


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
        searcher, hyperparameters, seed, folder: As for :func:`create_search`.
        objective: Metric of a trial at a length.
        slots: Trials that train at a time. Defaults to as many as the search wants.
        order: Which of the running trials reports next. ``time``: each trains one unit a tick; ``random``: any of them,
            by ``seed``.
        record: Whether to keep the record of events and actions.
        search: A search to run instead of a new one, before its first event.

    Raises:
        SearchError: If the search failed, or stalled: it is unfinished, but no trial can run.
    """
    simulation = Simulation(search or create_search(searcher, hyperparameters, seed, folder=folder))
    rng = random.Random(seed) if order == "random" else None
    _Simulator(simulation, objective, slots, rng, record).run()
    return simulation


class _Simulator:
    """Event loop of a simulation: a heap of running trials by the time of their next report."""

    def __init__(
        self, simulation: Simulation, objective: Objective, slots: int | None, rng: random.Random | None, record: bool
    ) -> None:
        self._simulation = simulation
        self._objective = objective
        self._slots = slots
        self._rng = rng
        self._record = record
        self._trials: dict[str, SimulatedTrial] = {}
        self._waiting: deque[SimulatedTrial] = deque()
        self._running: list[tuple[float, int, int, SimulatedTrial]] = []
        """Time of the next report, number of the start, length then, trial; the second makes each unique."""
        self._started = 0
        self._stages: list[int] = []
        """Lengths of validations on the way, in a search that validations drive."""
        search = simulation.search
        if "validated" in search.event_kinds:
            self._stages = sorted({rung["length"] for bracket in search.rungs() for rung in bracket["rungs"]})

    def run(self) -> None:
        """Run until no trial trains."""
        self._send(Started())
        self._fill()
        while self._running:
            self._simulation.time, _, length, trial = heappop(self._running)
            if not trial.stopped:
                self._reach(trial, length)
            self._fill()
        self._simulation.trials = list(self._trials.values())
        if not self._simulation.search.over:
            raise SearchError("search stalled: unfinished, but no trial can run")

    def _reach(self, trial: SimulatedTrial, length: int) -> None:
        """Report for a trial that has trained ``length`` units."""
        try:
            result = self._objective(trial.hparams, length, trial.number)
        except InvalidHP:
            result = "invalid_hp"
        if isinstance(result, str):
            self._exit(trial, result)
            return
        self._simulation.units += length - trial.length
        trial.reports += ((length, result),)
        if length == trial.target:
            trial.target = None
            self._send(Completed(trial.request_id, length, result))
            if trial.closed and trial.target is None and trial.exited is None:
                self._exit(trial, "completed")
            return
        self._send(Validated(trial.request_id, length, result))
        if not trial.stopped:
            self._start(trial)

    def _send(self, event: Event) -> None:
        """Send an event to the search and carry out its actions."""
        actions = self._simulation.search.handle(event)
        self._simulation.decisions += 1
        if self._record:
            self._simulation.record.append((event, actions))
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
                    trial.stopped = True
                    trial.target = None
                closed.append(trial)
        # Only now: an exit is an event of its own, which the search answers after the present one.
        for trial in closed:
            if trial.target is None and trial.exited is None:
                self._exit(trial, "completed")

    def _exit(self, trial: SimulatedTrial, reason: ExitReason) -> None:
        trial.exited = reason
        trial.target = None
        self._send(Exited(trial.request_id, reason))

    def _fill(self) -> None:
        """Start waiting trials while slots are free."""
        while self._waiting and (self._slots is None or len(self._running) < self._slots):
            trial = self._waiting.popleft()
            if not trial.stopped:
                self._start(trial)

    def _start(self, trial: SimulatedTrial) -> None:
        assert trial.target is not None
        trained = trial.length
        length = next((stage for stage in self._stages if trained < stage < trial.target), trial.target)
        self._started += 1
        if self._rng is None:
            end = self._simulation.time + length - trained
        else:
            end = self._rng.random()
        heappush(self._running, (end, self._started, length, trial))
