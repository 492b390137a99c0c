"""What all searches share. A search is a fold over its record: the events, each with the actions that answered it.

The record is the only truth. :meth:`Search.handle` takes an event into the state and decides; :meth:`Search.apply`
takes a recorded event with its recorded actions and decides nothing, as Optuna, a user's method or a newer det_core
would decide otherwise than what trials were told. Both change the state in the same two places, ``_apply_event`` for an
event and ``_apply_action`` for an action, so a search that is recovered is the search that went on.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core.errors import SearchError
from det_core.search._events import (
    JSON,
    Action,
    Close,
    Completed,
    Create,
    Event,
    Exited,
    Posted,
    Progress,
    SetProgress,
    Shutdown,
    Started,
    Stop,
    TrainTo,
    TrialCreated,
    Validated,
)
from det_core.search._space import Space

WORST_SCORE = 1.7976931348623157e308
"""The score that stands for none: the largest finite number, so that it can be sorted."""
MAX_INVALID_IN_A_ROW = 100
"""Trials in a row with hyperparameters that cannot be trained, after which none is replaced any more."""


@dataclass(slots=True, eq=False)
class Trial:
    """A trial as its search sees it."""

    request_id: str
    length: int | None = None
    """The length of the operation it has not done yet."""
    done: int = -1
    """The length of the last operation it has done; -1: none yet."""
    units: float = 0
    closed: bool = False
    exited: str | None = None
    """The reason of its exit."""
    score: float = WORST_SCORE
    """What it last reported, smaller being better."""
    bracket: int = 0
    rung: int = 0
    """The rung that it trains for, or waits on."""
    entered: int = 0
    """How many rungs, from the lowest, have its score."""

    @property
    def is_finished(self) -> bool:
        """Whether it will train no more."""
        return self.closed or self.exited is not None


class Search(ABC):
    """Decides which trials there are and how long each trains. One object for an experiment; not thread-safe.

    The same configuration, seed and events give the same decisions. To record a search, keep each event with the
    actions that :meth:`handle` answered; to recover it, :meth:`apply` the record to a new one. An event that tells
    nothing new (a trial that exits twice) gives no actions: a master that was killed tells some again.
    """

    event_kinds: frozenset[str] = frozenset({"started", "completed", "exited"})
    """The kinds of events that matter to its decisions; the others need not be recorded, nor sent."""
    _ends_with_its_trials = True
    """Whether it is over when all trials are and nothing new was created."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        """Use :func:`create_search`."""
        self._searcher, self._seed = searcher, seed
        self._space = Space(hyperparameters)
        self._rng = random.Random()  # seeded anew for each trial, which takes half as long as a new one
        self._sign = 1.0 if searcher.get("smaller_is_better", True) else -1.0
        self._trials: dict[str, Trial] = {}
        self._started = self._over = False
        self._exits: Counter[str] = Counter()
        self._invalid_in_a_row = 0
        self._progress: float | None = None

    @property
    def over(self) -> bool:
        """Whether :class:`Shutdown` was decided."""
        return self._over

    def handle(self, event: Event) -> list[Action]:
        """Take an event into the state, decide, and take the decisions into it too.

        Args:
            event: what has happened. Events come in the order in which they are recorded.

        Returns:
            What is to be done, in this order.

        Raises:
            SearchError: the event is about a trial or an operation that the search does not know, or the user's
                method failed or decided what cannot be done. The state may then be half-way: recover it.
        """
        actions: list[Action] = []
        if self._over or not self._apply_event(event):
            return actions
        for action in self._decide(event):
            self._apply_action(event, action)
            actions.append(action)
        count = len(self._trials)
        if isinstance(event, Exited) and self._ends_with_its_trials and self._exits.total() >= count and not self._over:
            end = Shutdown(failure=self._exits["errored"] >= count, cancel=self._exits["canceled"] >= count)
            self._apply_action(event, end)
            actions.append(end)
        return actions

    def apply(self, event: Event, actions: Sequence[Action]) -> None:
        """Take an event and what was decided then into the state, and decide nothing.

        Args:
            event: as it was recorded.
            actions: those that were recorded with it, also if :meth:`handle` would decide otherwise today.

        Raises:
            SearchError: as :meth:`handle`.
        """
        if not self._over and self._apply_event(event):
            self._on_replay(event, actions)
        for action in actions:
            self._apply_action(event, action)

    def progress(self) -> float:
        """How much of the search is done, 0 to 1."""
        value = 1.0 if self._over else self._fraction_done() if self._progress is None else self._progress
        return min(max(value, 0.0), 1.0) if value == value else 0.0

    def rungs(self) -> list[JSON]:
        """The brackets with their rungs and who is on them, for people; empty if the method has none.

        Each bracket is ``{"bracket", "max_trials", "max_concurrent_trials", "rungs"}``, each rung ``{"rung", "length",
        "outstanding", "entries"}`` and each entry, best first, ``{"request_id", "metric", "state"}`` with the metric as
        reported (None: it ended without one) and the state promoted, parked, closed or exited.
        """
        return []

    # What a method does itself.

    @abstractmethod
    def _decide(self, event: Event) -> Iterable[Action]:
        """What an event leads to. Each action is carried out before the next one is asked for."""

    @abstractmethod
    def _fraction_done(self) -> float:
        """How much of the search is done; what is not a number counts as nothing."""

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        """Take what a trial says into the method's own state; ``target_length``: of its operation."""
        return None

    def _on_action(self, event: Event, action: Action, trial: Trial | None) -> None:
        """Take an action, and the trial that it is about, into the method's own state."""
        return None

    def _on_replay(self, event: Event, actions: Sequence[Action]) -> None:
        """Let code that is not ours see a recorded event, before its actions are carried out."""
        return None

    # What a method calls.

    def _create_trial(self, hparams: JSON | None = None, number: int | None = None) -> Create:
        """A new trial. The n-th of an experiment draws from a generator of its own, seeded by the experiment's seed
        and n: what is drawn depends on nothing that went before, and there is no state to keep."""
        rng = self._rng
        rng.seed(f"{self._seed}/{len(self._trials) if number is None else number}")
        seed, digits = rng.getrandbits(31), f"{rng.getrandbits(128):032x}"
        # A UUID of version 4, as str(uuid.UUID(...)) writes it, at a fifth of the time.
        request_id = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
        return Create(request_id, self._propose(rng, seed) if hparams is None else dict(hparams), seed)

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        """The hyperparameters of the next trial, whose seed is given."""
        return self._space.sample(rng)

    def _score(self, metric: float) -> float:
        """The metric so that smaller is better, and finite."""
        score = self._sign * metric
        return min(max(score, -WORST_SCORE), WORST_SCORE) if score == score else WORST_SCORE

    # How the state follows.

    def _apply_event(self, event: Event) -> bool:
        """Take an event into the state; False if it tells nothing new, or nothing that the method uses."""
        if isinstance(event, Started):
            new, self._started = not self._started, True
            return new
        if isinstance(event, Posted):
            if event.kind not in self.event_kinds:
                name = self._searcher["name"]
                raise SearchError(f"the search {name!r} decides by itself: no operations can be sent to it")
            return True
        trial = self._trial(event.request_id)
        target_length = trial.length
        if isinstance(event, Completed):
            if trial.exited is not None or event.length <= trial.done or (target_length is None and trial.closed):
                return False
            if target_length != event.length:
                raise SearchError(
                    f"trial {event.request_id} completed length {event.length}; it was to train to {target_length}"
                )
            trial.length, trial.done, trial.units, self._invalid_in_a_row = None, event.length, event.length, 0
        elif isinstance(event, Exited):
            if trial.exited is not None:
                return False
            trial.length, trial.exited = None, event.reason
            self._exits[event.reason] += 1
            self._invalid_in_a_row += event.reason == "invalid_hp"
        elif isinstance(event, Progress):
            trial.units = event.units
        elif isinstance(event, Validated) and trial.is_finished:
            return False
        if event.kind not in self.event_kinds:
            return False
        if not isinstance(event, (TrialCreated, Progress)):
            self._on_trial_event(event, trial, target_length)
        return True

    def _apply_action(self, event: Event, action: Action) -> None:
        """Take one decision into the state."""
        trial = None
        if isinstance(action, Create):
            trial = self._trials[action.request_id] = Trial(action.request_id)
        elif isinstance(action, TrainTo):
            trial = self._trial(action.request_id)
            trial.length = action.length
        elif isinstance(action, (Close, Stop)):
            trial = self._trial(action.request_id)
            trial.closed = True
            if isinstance(action, Stop):
                trial.length = None
        elif isinstance(action, SetProgress):
            self._progress = action.progress
        else:
            self._over = True
        self._on_action(event, action, trial)

    def _trial(self, request_id: str) -> Trial:
        try:
            return self._trials[request_id]
        except KeyError:
            raise SearchError(f"the search has no trial {request_id}") from None
