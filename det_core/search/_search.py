"""What all searches have in common: the trials, the random numbers, the end, and how a search is recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from det_core.errors import SearchError
from det_core.search._actions import Action, Close, Create, SetProgress, Shutdown, Stop, TrainTo
from det_core.search._events import Completed, Event, Exited, Posted, Progress, Started, Validated
from det_core.search._random import RandomState, uuid4_of
from det_core.search._space import Space
from det_core.search._trial import WORST, Trial

JSON = dict[str, Any]
FUTILE = 100
"""Trials in a row with hyperparameters that cannot be trained, after which none is replaced any more."""


class Search(ABC):
    """Decides which trials there are and how long each trains. One object for an experiment; not thread-safe.

    A search is a state machine: the same configuration, seed and events give the same decisions. To record one,
    keep each event with the actions that :meth:`handle` answered; to recover it, :meth:`restore` the last snapshot
    and :meth:`apply` what came after. An event that tells nothing new (a trial that exits twice) gives no actions.
    """

    uses: frozenset[str] = frozenset({"started", "completed", "exited"})
    """The kinds of events that matter to its decisions; the others need not be recorded, nor sent."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        """Use :func:`create_search`."""
        self._searcher = searcher
        self._space = Space(hyperparameters)
        self._random = RandomState(seed)
        self._sign = 1.0 if searcher.get("smaller_is_better", True) else -1.0
        self._trials: dict[str, Trial] = {}
        self._heard: Trial | None = None
        self._started = self._over = False
        self._exits = {"completed": 0, "errored": 0, "invalid_hp": 0, "canceled": 0}
        self._exited = self._futile = 0
        self._progress: float | None = None

    @property
    def over(self) -> bool:
        """Whether :class:`Shutdown` was decided."""
        return self._over

    def handle(self, event: Event) -> list[Action]:
        """Decide, and take the decision into the state.

        Args:
            event: what has happened. Events come in the order in which they are recorded.

        Returns:
            What is to be done, in this order.

        Raises:
            SearchError: the event is about a trial or an operation that the search does not know, or the user's
                method failed or decided what cannot be done. The state may then be half-way: restore it.
        """
        out: list[Action] = []
        if self._over or not self._hear(event):
            return out
        self._react(event, self._heard, out)
        if type(event) is Exited:
            self._end_if_all_exited(out)
        return out

    def apply(self, event: Event, actions: Sequence[Action]) -> None:
        """Take an event and what was decided then into the state, and decide nothing.

        Args:
            event: as it was recorded.
            actions: those that were recorded with it, also if :meth:`handle` would decide otherwise today.

        Raises:
            SearchError: as :meth:`handle`.
        """
        if not self._over:
            self._hear(event)
        for action in actions:
            if type(action) is Create:
                self._redraw(action)
            self._take(event, action)

    def progress(self) -> float:
        """How much of the search is done, 0 to 1."""
        if self._over:
            return 1.0
        value = self._share_done() if self._progress is None else self._progress
        return min(max(value, 0.0), 1.0) if value - value == 0 else 0.0

    def rungs(self) -> list[JSON]:
        """The brackets with their rungs and who is on them, for people; empty if the method has none.

        Each bracket is ``{"bracket", "max_trials", "max_concurrent_trials", "rungs"}``, each rung ``{"rung", "length",
        "outstanding", "entries"}`` and each entry, best first, ``{"request_id", "metric", "state"}`` with the metric as
        reported (None: it ended without one) and the state promoted, parked, closed or exited.
        """
        return []

    def snapshot(self) -> JSON:
        """The whole state, for JSON and :meth:`restore`."""
        return {
            "version": 1,
            "random": self._random.state(),
            "trials": [trial.to_list() for trial in self._trials.values()],
            "started": self._started,
            "over": self._over,
            "exits": dict(self._exits),
            "futile": self._futile,
            "progress": self._progress,
            "method": self._method_state(),
        }

    @staticmethod
    def restore(
        searcher: Mapping[str, Any],
        hyperparameters: Mapping[str, Any],
        seed: int,
        snapshot: Mapping[str, Any],
        *,
        folder: str | None = None,
    ) -> Search:
        """The search as it was when the snapshot was taken.

        Args:
            searcher, hyperparameters, seed, folder: as :func:`create_search` got them.
            snapshot: what :meth:`snapshot` gave.

        Raises:
            SearchError: the snapshot is of a version that is not known here.
        """
        from det_core.search._create import create_search

        if snapshot.get("version") != 1:
            raise SearchError(f"a snapshot of a search has version {snapshot.get('version')!r}; known here is 1")
        search = create_search(searcher, hyperparameters, seed, folder=folder)
        search._load(snapshot)
        return search

    # What a method does itself.

    @abstractmethod
    def _react(self, event: Event, trial: Trial | None, out: list[Action]) -> None:
        """Decide by ``_create``, ``_train``, ``_close``, ``_stop``, which change the state; nothing else here may."""

    def _absorb(self, event: Completed | Validated | Exited, trial: Trial, told: int | None) -> None:
        """Take what a trial says into the method's state.

        Args:
            event: what it says.
            trial: the trial; what all methods keep of it is up to date.
            told: the length of the operation that it had.
        """
        return None

    def _entered(self, event: Event, trial: Trial) -> None:
        """A trial was created in answer to an event."""
        return None

    def _told(self, trial: Trial) -> None:
        """A trial was given its next operation, ``trial.length``."""
        return None

    def _closed(self, trial: Trial) -> None:
        """A trial was closed or stopped."""
        return None

    @abstractmethod
    def _share_done(self) -> float:
        """How much of the search is done; what is not a number counts as nothing."""

    def _method_state(self) -> Any:
        """What a snapshot holds of the method itself."""
        return None

    def _load_method(self, state: Any) -> None:
        """Take :meth:`_method_state` back; the trials are there already."""
        return None

    def _sample(self) -> JSON:
        """The hyperparameters of the next trial."""
        return self._space.sample(self._random)

    def _new(self) -> Create:
        """The next trial. The order in which it draws is that of the wire contract 11.2."""
        hparams = self._sample()
        request_id = self._new_id()
        return Create(request_id, hparams, self._random.getrandbits(32) & 0x7FFFFFFF)

    def _redraw(self, action: Create) -> None:
        """Draw what :meth:`_new` drew when ``action`` was decided, so that later trials are not the same again."""
        self._new()

    # What a method calls.

    def _create(self, event: Event, out: list[Action]) -> Trial:
        action = self._new()
        out.append(action)
        trial = self._trials[action.request_id] = Trial(action.request_id)
        self._entered(event, trial)
        return trial

    def _train(self, trial: Trial, length: int, out: list[Action]) -> None:
        out.append(TrainTo(trial.request_id, length))
        trial.length = length
        self._told(trial)

    def _close(self, trial: Trial, out: list[Action]) -> None:
        out.append(Close(trial.request_id))
        trial.closed = True
        self._closed(trial)

    def _stop(self, trial: Trial, out: list[Action]) -> None:
        out.append(Stop(trial.request_id))
        trial.closed, trial.length = True, None
        self._closed(trial)

    def _score(self, metric: float) -> float:
        """The metric so that smaller is better; finite, so that it can be sorted and kept."""
        score = self._sign * metric
        return min(max(score, -WORST), WORST) if score == score else WORST

    def _replaceable(self) -> bool:
        """Whether a trial that could not be trained gets another one in its place."""
        return self._futile < FUTILE

    def _new_id(self) -> str:
        return uuid4_of(self._random.bytes16())

    # How the state follows.

    def _hear(self, event: Event) -> bool:
        """Take an event into the state; False if it tells nothing new."""
        if isinstance(event, Started):
            fresh, self._started, self._heard = not self._started, True, None
            return fresh
        if isinstance(event, Posted):
            self._heard = None
            return self._hear_posted(event)
        trial = self._heard = self._trial(event.request_id)
        if isinstance(event, Completed):
            return self._hear_completed(event, trial)
        if isinstance(event, Exited):
            return self._hear_exited(event, trial)
        if isinstance(event, Validated):
            if trial.gone or event.kind not in self.uses:
                return False
            self._absorb(event, trial, trial.length)
        elif isinstance(event, Progress):
            trial.units = event.units
        return event.kind in self.uses

    def _hear_posted(self, event: Posted) -> bool:
        raise SearchError(f"the search {self._searcher['name']!r} decides by itself: no operations can be sent to it")

    def _hear_completed(self, event: Completed, trial: Trial) -> bool:
        told = trial.length
        if trial.exited is not None or event.length <= trial.done or (told is None and trial.closed):
            return False
        if told != event.length:
            raise SearchError(f"trial {event.request_id} completed length {event.length}; it was to train to {told}")
        trial.length = None
        trial.done = trial.units = event.length
        self._futile = 0
        self._absorb(event, trial, told)
        return True

    def _hear_exited(self, event: Exited, trial: Trial) -> bool:
        if trial.exited is not None:
            return False
        told, trial.length = trial.length, None
        trial.exited = event.reason
        self._exits[event.reason] += 1
        self._exited += 1
        if event.reason == "invalid_hp":
            self._futile += 1
        self._absorb(event, trial, told)
        return True

    def _take(self, event: Event, action: Action) -> None:
        """Take one decision into the state."""
        if isinstance(action, Create):
            trial = self._trials[action.request_id] = Trial(action.request_id)
            self._entered(event, trial)
        elif isinstance(action, TrainTo):
            trial = self._trial(action.request_id)
            trial.length = action.length
            self._told(trial)
        elif isinstance(action, (Close, Stop)):
            trial = self._trial(action.request_id)
            trial.closed = True
            if isinstance(action, Stop):
                trial.length = None
            self._closed(trial)
        elif isinstance(action, SetProgress):
            self._progress = action.progress
        else:
            self._over = True

    def _end_if_all_exited(self, out: list[Action]) -> None:
        count = len(self._trials)
        if not self._over and self._exited >= count:
            self._over = True
            out.append(Shutdown(failure=self._exits["errored"] >= count, cancel=self._exits["canceled"] >= count))

    def _trial(self, request_id: str) -> Trial:
        trial = self._trials.get(request_id)
        if trial is None:
            raise SearchError(f"the search has no trial {request_id}")
        return trial

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        self._random.set_state(snapshot["random"])
        trials = [Trial.from_list(values) for values in snapshot["trials"]]
        self._trials = {trial.request_id: trial for trial in trials}
        self._started, self._over = snapshot["started"], snapshot["over"]
        self._exits = dict(snapshot["exits"])
        self._exited = sum(self._exits.values())
        self._futile, self._progress = snapshot["futile"], snapshot["progress"]
        self._load_method(snapshot["method"])
