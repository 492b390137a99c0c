"""Search methods of the user's own: a Python class, or a program that sends its decisions over HTTP."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from det_core.errors import SearchError
from det_core.search._actions import Action, Close, Create, Stop, TrainTo, action_from_dict
from det_core.search._events import Event, Posted, event_from_dict
from det_core.search._find import find_class
from det_core.search._method import SearchMethod, SearchSetup
from det_core.search._search import JSON, Search
from det_core.search._trial import Trial

logger = logging.getLogger("det_core.search")


def custom_search(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None
) -> Search:
    """The class that ``searcher.class`` names; without one, the decisions are sent to the master."""
    if searcher.get("class") is None:
        return RemoteSearch(searcher, hyperparameters, seed)
    return CustomSearch(searcher, hyperparameters, seed, find_class(searcher["class"], folder))


class _Checked(Search):
    """A search whose decisions come from outside, and may be wrong."""

    def _accept(self, event: Event, actions: Sequence[Action], who: str, out: list[Action]) -> None:
        for action in actions:
            if self._meant(action, who):
                self._take(event, action)
                out.append(action)

    def _meant(self, action: Action, who: str) -> bool:
        """Whether an action is to be carried out; it is not if it is about a trial that is over."""
        if isinstance(action, Create):
            if action.request_id in self._trials:
                raise SearchError(f"{who} creates trial {action.request_id} a second time")
        elif isinstance(action, (TrainTo, Close, Stop)):
            trial = self._trials.get(action.request_id)
            if trial is None:
                raise SearchError(f"{who} decides on trial {action.request_id}, which it has not created")
            if trial.exited is not None:
                return False
            if isinstance(action, TrainTo):
                self._check_length(action, trial, who)
        return True

    def _check_length(self, action: TrainTo, trial: Trial, who: str) -> None:
        where = f"{who} has trial {action.request_id} train to {action.length}"
        if trial.closed:
            raise SearchError(f"{where} after it closed it")
        if trial.length is not None:
            raise SearchError(f"{where} while it still trains to {trial.length}")
        if action.length <= trial.done:
            raise SearchError(f"{where}, and it has trained {trial.done} already: lengths count from the trial's start")

    def _share_done(self) -> float:
        return sum(self._exits.values()) / len(self._trials) if self._trials else 0.0


class CustomSearch(_Checked):
    """A :class:`SearchMethod` with all that a search needs around it."""

    def __init__(
        self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, cls: type[SearchMethod]
    ) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._who = f"the search method {cls.__name__}"
        self._script: deque[Create] = deque()
        self._log: list[tuple[Event, list[Action]]] = []
        self._method = cls(SearchSetup(searcher, hyperparameters, self._random, self._created))
        self.uses = frozenset(cls.uses) | Search.uses

    def handle(self, event: Event) -> list[Action]:
        actions = super().handle(event)
        self._log.append((event, actions))
        return actions

    def apply(self, event: Event, actions: Sequence[Action]) -> None:
        """As :meth:`Search.apply`; the method is told the event, and gets the trials that it created then."""
        self._log.append((event, list(actions)))
        if not self._over and self._hear(event):
            self._script.extend(action for action in actions if isinstance(action, Create))
            decided = self._ask(event)
            self._script.clear()
            taken = [a for a in decided if not self._about_exited(a)]
            if taken != list(actions)[: len(taken)]:
                logger.warning("%s decides otherwise now than it did; what was recorded stands", self._who)
        for action in actions:
            self._take(event, action)

    def _react(self, event: Event, trial: Trial | None, out: list[Action]) -> None:
        self._accept(event, self._ask(event), self._who, out)

    def _ask(self, event: Event) -> list[Action]:
        try:
            return list(self._method.handle(event))
        except Exception as e:
            raise SearchError(f"{self._who} failed at {event}: {type(e).__name__}: {e}") from e

    def _created(self, hparams: JSON | None) -> Create:
        values = self._sample() if hparams is None else dict(hparams)
        request_id = self._new_id()
        fresh = Create(request_id, values, self._random.getrandbits(32) & 0x7FFFFFFF)
        return self._script.popleft() if self._script else fresh

    def _about_exited(self, action: Action) -> bool:
        trial = self._trials.get(getattr(action, "request_id", ""))
        return trial is not None and trial.exited is not None

    def _share_done(self) -> float:
        told = self._method.progress()
        return super()._share_done() if told is None else told

    def _method_state(self) -> Any:
        state = self._method.snapshot()
        if state is not None:
            return {"state": state}
        return {"log": [[event.to_dict(), [action.to_dict() for action in taken]] for event, taken in self._log]}

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        log = snapshot["method"].get("log")
        if log is None:
            super()._load(snapshot)
            return
        for event, actions in log:
            self.apply(event_from_dict(event), [action_from_dict(action) for action in actions])

    def _load_method(self, state: Any) -> None:
        self._method.restore(state["state"])


class RemoteSearch(_Checked):
    """The decisions are made elsewhere and sent as :class:`Posted`; nothing but that decides anything, nor ends it."""

    uses = frozenset({"started", "trial_created", "completed", "validated", "progress", "exited", "posted"})

    def _hear_posted(self, event: Posted) -> bool:
        return True

    def _react(self, event: Event, trial: Trial | None, out: list[Action]) -> None:
        if isinstance(event, Posted):
            self._accept(event, event.actions, "the search outside the master", out)

    def _redraw(self, action: Create) -> None:
        return None

    def _end_if_all_exited(self, out: list[Action]) -> None:
        return None
