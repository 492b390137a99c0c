"""Running a search without training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from det_core.errors import InvalidHP, SearchError
from det_core.search._actions import Action, Close, Create, Stop, TrainTo
from det_core.search._create import create_search
from det_core.search._events import Completed, Event, Exited, Reason, Started, Validated
from det_core.search._garbage import young_garbage_only
from det_core.search._search import Search

JSON = dict[str, Any]
MetricOf = Callable[[JSON, int, int], "float | Reason"]
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
    exited: Reason | None = None
    told: int | None = None
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
    trials: list[SimulatedTrial]
    decisions: int
    """How many events the search was told, each of which it answered."""
    units: int
    """How many units were trained in all."""
    time: float
    """When the last trial ended, if each unit takes one tick."""
    record: list[tuple[Event, list[Action]]]
    """Every event with the actions it led to; empty unless asked for."""


def simulate(
    searcher: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    seed: int,
    metric_of: MetricOf,
    *,
    slots: int | None = None,
    order: Order = "time",
    record: bool = False,
    search: Search | None = None,
    folder: str | None = None,
) -> Simulation:
    """Run a search to its end with trials that train in no time.

    Python's garbage collector leaves old objects alone meanwhile, in the whole process: the search makes no cycles,
    and cycles of ``metric_of`` that live for long are collected afterwards.

    Args:
        searcher, hyperparameters, seed, folder: as for :func:`create_search`.
        metric_of: what a trial reports, after how long.
        slots: how many trials train at a time; None: as many as the search wants.
        order: which of the running trials reports next. ``time``: each trains one unit a tick; ``random``: any of them,
            by ``seed``.
        record: whether to keep the record of events and actions.
        search: a search to run instead of a new one, before its first event.

    Raises:
        SearchError: the search failed, or it stands still: no trial is left to train, and it is not over.
    """
    search = search or create_search(searcher, hyperparameters, seed, folder=folder)
    with young_garbage_only():
        return _Simulator(search, metric_of, slots, random.Random(seed) if order == "random" else None, record).run()


class _Simulator:
    def __init__(
        self, search: Search, metric_of: MetricOf, slots: int | None, dice: random.Random | None, record: bool
    ) -> None:
        self._search, self._metric_of, self._slots, self._dice = search, metric_of, slots, dice
        self._trials: dict[str, SimulatedTrial] = {}
        self._waiting: deque[SimulatedTrial] = deque()
        self._running: list[tuple[float, int, int, SimulatedTrial]] = []
        self._record: list[tuple[Event, list[Action]]] | None = [] if record else None
        self._stages = _stages(search)
        self._order = self._events = self._units = 0
        self._now = 0.0

    def run(self) -> Simulation:
        """Until nothing trains any more."""
        self._tell(Started())
        self._fill()
        running = self._running
        while running:
            self._now, _, length, trial = heappop(running)
            if not trial.stopped:
                self._reach(trial, length)
            if self._waiting:
                self._fill()
        if not self._search.over:
            raise SearchError("the search stands still: no trial is left to train, and it is not over")
        return Simulation(
            self._search, list(self._trials.values()), self._events, self._units, self._now, self._record or []
        )

    def _reach(self, trial: SimulatedTrial, length: int) -> None:
        """A trial has trained ``length`` units."""
        try:
            said = self._metric_of(trial.hparams, length, trial.number)
        except InvalidHP:
            said = "invalid_hp"
        if isinstance(said, str):
            self._exit(trial, said)
            return
        self._units += length - trial.length
        trial.reports += ((length, said),)
        if length == trial.told:
            trial.told = None
            self._tell(Completed(trial.request_id, length, said))
            if trial.closed and trial.told is None and trial.exited is None:
                self._exit(trial, "completed")
            return
        self._tell(Validated(trial.request_id, length, said))
        if not trial.stopped:
            self._start(trial)

    def _tell(self, event: Event) -> None:
        actions = self._search.handle(event)
        self._events += 1
        if self._record is not None:
            self._record.append((event, actions))
        over: list[SimulatedTrial] = []
        for action in actions:
            if isinstance(action, TrainTo):
                trial = self._trials[action.request_id]
                trial.told = action.length
                self._waiting.append(trial)
            elif isinstance(action, Create):
                name = action.request_id
                self._trials[name] = SimulatedTrial(len(self._trials), name, action.hparams, action.seed)
            elif isinstance(action, (Close, Stop)):
                trial = self._trials[action.request_id]
                trial.closed = True
                if isinstance(action, Stop):
                    trial.stopped, trial.told = True, None
                over.append(trial)
        for trial in over:
            if trial.told is None and trial.exited is None:
                self._exit(trial, "completed")

    def _exit(self, trial: SimulatedTrial, reason: Reason) -> None:
        trial.exited, trial.told = reason, None
        self._tell(Exited(trial.request_id, reason))

    def _fill(self) -> None:
        """Start what waits, as far as there are slots."""
        waiting, slots = self._waiting, self._slots
        while waiting and (slots is None or len(self._running) < slots):
            trial = waiting.popleft()
            if not trial.stopped:
                self._start(trial)

    def _start(self, trial: SimulatedTrial) -> None:
        assert trial.told is not None
        trained, length = trial.length, trial.told
        for stage in self._stages:
            if trained < stage < length:
                length = stage
                break
        self._order += 1
        end = self._now + length - trained if self._dice is None else self._dice.random()
        heappush(self._running, (end, self._order, length, trial))


def _stages(search: Search) -> list[int]:
    """The lengths at which trials report on the way, which only a search that validations drive has."""
    if "validated" not in search.uses:
        return []
    return sorted({rung["length"] for bracket in search.rungs() for rung in bracket["rungs"]})
