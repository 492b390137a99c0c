"""Base of all searches: a fold over a record of events, each with the actions that answered it.

The record is the only truth. :meth:`Search.handle` applies an event to the state and decides; :meth:`Search.apply`
applies a recorded event with its recorded actions and decides nothing, because Optuna, a user's method or a newer
det_core would decide otherwise than trials were run. Both change the state in the same two places, ``_apply_event`` and
``_apply_action``, so a recovered search equals one that was never interrupted.
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
"""Score of a trial without a metric: the largest finite number, so that it can be sorted."""
MAX_INVALID_IN_A_ROW = 100
"""Trials in a row with invalid hyperparameters after which none is replaced."""


@dataclass(slots=True, eq=False)
class Trial:
    """State of a trial in its search."""

    request_id: str
    length: int | None = None
    """Length of its pending operation."""
    done: int = -1
    """Length of its last completed operation; -1 before the first."""
    units: float = 0
    closed: bool = False
    exited: str | None = None
    """Reason of its exit."""
    score: float = WORST_SCORE
    """Score of its last report; smaller is better."""
    bracket: int = 0
    rung: int = 0
    """Rung that it trains for, or waits on."""
    entered: int = 0
    """Number of rungs, from the lowest, that have its score."""

    @property
    def is_finished(self) -> bool:
        """Whether it trains no further."""
        return self.closed or self.exited is not None


class Search(ABC):
    """Policy that decides which trials there are and how long each trains; one per experiment, not thread-safe.

    The same configuration, seed and events give the same decisions. To record a search, keep each event with the
    actions that :meth:`handle` returned; to recover it, :meth:`apply` the record to a new one. A repeated event (a
    trial that exits twice) has no actions: a master that was killed sends some again.
    """

    event_kinds: frozenset[str] = frozenset({"started", "completed", "exited"})
    """Kinds of events that affect its decisions; others need not be recorded, nor sent."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        """Initialize a search before its first event; use :func:`create_search`."""
        self._searcher = searcher
        self._seed = seed
        self._space = Space(hyperparameters)
        self._rng = random.Random()  # seeded anew for each trial, which takes half as long as a new one
        self._sign = 1.0 if searcher.get("smaller_is_better", True) else -1.0
        self._trials: dict[str, Trial] = {}
        self._started = False
        self._over = False
        self._exits: Counter[str] = Counter()
        self._invalid_in_a_row = 0
        self._progress: float | None = None

    @property
    def over(self) -> bool:
        """Whether :class:`Shutdown` was decided."""
        return self._over

    def handle(self, event: Event) -> list[Action]:
        """Apply an event to the state, decide on it, and apply the decisions.

        Args:
            event: Next event, in the order in which events are recorded.

        Returns:
            The actions to carry out, in order.

        Raises:
            SearchError: If the trial or operation of the event is unknown, or the user's method failed or decided what
                cannot be carried out. The state may then be half-way: recover it.
        """
        actions: list[Action] = []
        if self._over or not self._apply_event(event):
            return actions
        for action in self._decide(event):
            # Before the next one is decided: a method reads the state that its own actions made.
            self._apply_action(event, action)
            actions.append(action)
        if isinstance(event, Exited) and not self._over:
            count = len(self._trials)
            if self._exits.total() >= count:
                end = Shutdown(failure=self._exits["errored"] >= count, cancel=self._exits["canceled"] >= count)
                self._apply_action(event, end)
                actions.append(end)
        return actions

    def apply(self, event: Event, actions: Sequence[Action]) -> None:
        """Apply a recorded event and its recorded actions, and decide nothing.

        Args:
            event: Event as recorded.
            actions: Actions recorded with it, even if :meth:`handle` would decide otherwise today.

        Raises:
            SearchError: As for :meth:`handle`.
        """
        if not self._over and self._apply_event(event):
            self._on_replay(event, actions)
        for action in actions:
            self._apply_action(event, action)

    def progress(self) -> float:
        """Return the fraction of the search that is done, 0 to 1."""
        if self._over:
            return 1.0
        fraction = self._progress
        if fraction is None:
            fraction = self._fraction_done()
        if fraction != fraction:  # NaN, from a user's method
            return 0.0
        return min(max(fraction, 0.0), 1.0)

    def rungs(self) -> list[JSON]:
        """Return the brackets with their rungs and the trials on them, for display; empty if the method has none.

        Each bracket is ``{"bracket", "max_trials", "max_concurrent_trials", "rungs"}``, each rung ``{"rung", "length",
        "outstanding", "entries"}`` and each entry, best first, ``{"request_id", "metric", "state"}`` with the metric as
        reported (None: it ended without one) and the state promoted, parked, closed or exited.
        """
        return []

    # Provided by a method.

    @abstractmethod
    def _decide(self, event: Event) -> Iterable[Action]:
        """Yield the actions that answer an event; each is applied before the next is requested."""

    @abstractmethod
    def _fraction_done(self) -> float:
        """Return the fraction of the search that is done; NaN counts as 0."""

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        """Update the method's own state from a trial's event; ``target_length`` is that of its operation before it."""
        return None

    def _on_action(self, event: Event, action: Action, trial: Trial | None) -> None:
        """Update the method's own state from an action and the trial that it is about."""
        return None

    def _on_replay(self, event: Event, actions: Sequence[Action]) -> None:
        """Show a recorded event to user-defined code, before its actions are applied."""
        return None

    # Called by a method.

    def _create_trial(self, hparams: JSON | None = None, number: int | None = None) -> Create:
        """Return the request for a new trial.

        Args:
            hparams: Its hyperparameters; drawn at random by default.
            number: Its number in the experiment, from 0. Defaults to the next one.
        """
        # The n-th trial has a generator of its own, seeded by the experiment's seed and n: a draw depends on no earlier
        # one, and no generator's state has to be recorded.
        if number is None:
            number = len(self._trials)
        rng = self._rng
        rng.seed(f"{self._seed}/{number}")
        seed = rng.getrandbits(31)
        digits = f"{rng.getrandbits(128):032x}"
        # A UUID of version 4, as str(uuid.UUID(...)) writes it, in a fifth of the time.
        request_id = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
        if hparams is None:
            return Create(request_id, self._propose(rng, seed), seed)
        return Create(request_id, dict(hparams), seed)

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        """Return the hyperparameters of the next trial, whose seed is given."""
        return self._space.sample(rng)

    def _score(self, metric: float) -> float:
        """Return a metric as a finite score, of which smaller is better."""
        score = self._sign * metric
        if score != score:
            return WORST_SCORE
        return min(max(score, -WORST_SCORE), WORST_SCORE)

    # How the state follows from the record.

    def _apply_event(self, event: Event) -> bool:
        """Apply an event to the state; return whether it is new and of a kind that the method uses."""
        if isinstance(event, Started):
            is_new = not self._started
            self._started = True
            return is_new
        trial = self._trial(event.request_id)
        target_length = trial.length
        if not self._update_trial(event, trial) or event.kind not in self.event_kinds:
            return False
        if not isinstance(event, (TrialCreated, Progress)):
            self._on_trial_event(event, trial, target_length)
        return True

    def _update_trial(self, event: TrialCreated | Completed | Validated | Progress | Exited, trial: Trial) -> bool:
        """Apply an event to its trial; return whether it is new."""
        if isinstance(event, Completed):
            # The master sends an event again if it was killed before the search's answer was on disk.
            if trial.exited is not None or event.length <= trial.done or (trial.length is None and trial.closed):
                return False
            if trial.length != event.length:
                raise SearchError(
                    f"trial {event.request_id} completed length {event.length}: expected {trial.length}, the length of "
                    "its operation"
                )
            trial.length = None
            trial.done = event.length
            trial.units = event.length
            self._invalid_in_a_row = 0
        elif isinstance(event, Exited):
            if trial.exited is not None:
                return False
            trial.length = None
            trial.exited = event.reason
            self._exits[event.reason] += 1
            self._invalid_in_a_row += event.reason == "invalid_hp"
        elif isinstance(event, Progress):
            trial.units = event.units
        elif isinstance(event, Validated):
            return not trial.is_finished
        return True

    def _apply_action(self, event: Event, action: Action) -> None:
        """Apply one decision to the state."""
        trial = None
        if isinstance(action, Create):
            trial = Trial(action.request_id)
            self._trials[action.request_id] = trial
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
