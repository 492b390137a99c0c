"""Search methods of the user's own: a Python class, or a program that sends its decisions over HTTP."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from det_core.errors import SearchError
from det_core.search._events import JSON, Action, Close, Create, Event, Posted, Shutdown, Stop, TrainTo
from det_core.search._search import Search, Trial

logger = logging.getLogger("det_core.search")


@dataclass(frozen=True)
class SearchSetup:
    """What a method is made with."""

    searcher: Mapping[str, Any]
    """The configuration's section ``searcher``, with your own keys."""
    hyperparameters: Mapping[str, Any]
    """Its section ``hyperparameters``."""
    random: Random
    """Random numbers for the method alone, seeded by the experiment's seed."""
    create: Callable[[JSON | None], Create]
    """What :meth:`SearchMethod.create` calls."""


class SearchMethod(ABC):
    """Inherit, write :meth:`handle`, and name the class in the configuration.

    ::

        searcher: {name: custom, class: "my_search:MySearch", metric: loss}

    A search that is recovered, after a crash of its master, is told all its events again, from the first. So the
    method must be deterministic: take random numbers from ``self.random`` only, and look at no clock and no file. Then
    it goes on as if nothing had happened. What it has decided before the crash stands in any case.
    """

    event_kinds: frozenset[str] = frozenset({"started", "completed", "exited"})
    """The kinds of events it is told; add "validated", "progress" or "trial_created" if it wants them."""

    def __init__(self, setup: SearchSetup) -> None:
        """Keep what it is made with; a method that needs more calls this first."""
        self.searcher = setup.searcher
        self.hyperparameters = setup.hyperparameters
        self.random = setup.random
        self._create = setup.create

    @abstractmethod
    def handle(self, event: Event) -> Sequence[Action]:
        """Decide what an event leads to.

        Args:
            event: what has happened; the first one is ``Started()``.

        Returns:
            What to do. Each trial has one operation at a time. When all trials are over and nothing new is created,
            the search ends by itself.
        """

    def create(self, hparams: JSON | None = None) -> Create:
        """A new trial, to be returned by the same call of :meth:`handle`.

        Args:
            hparams: its hyperparameters; None: drawn at random from the configuration's.
        """
        return self._create(hparams)

    def progress(self) -> float | None:
        """How much of the search is done, 0 to 1; None: the share of the trials that are over."""
        return None


class _CheckedSearch(Search):
    """A search whose decisions come from outside, and may be wrong."""

    _source: str

    def _validated(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The actions that can be carried out; one that is about a trial that is over is left out.

        Raises:
            SearchError: one of them makes no sense.
        """
        for action in actions:
            if isinstance(action, Create):
                if action.request_id in self._trials:
                    raise SearchError(f"{self._source} creates trial {action.request_id} a second time")
            elif isinstance(action, (TrainTo, Close, Stop)):
                trial = self._trials.get(action.request_id)
                if trial is None:
                    raise SearchError(f"{self._source} decides on trial {action.request_id}, which it has not created")
                if trial.exited is not None:
                    continue
                if isinstance(action, TrainTo):
                    self._check_length(action, trial)
            yield action

    def _check_length(self, action: TrainTo, trial: Trial) -> None:
        where = f"{self._source} has trial {action.request_id} train to {action.length}"
        if trial.closed:
            raise SearchError(f"{where} after it closed it")
        if trial.length is not None:
            raise SearchError(f"{where} while it still trains to {trial.length}")
        if action.length <= trial.done:
            raise SearchError(f"{where}, and it has trained {trial.done} already: lengths count from the trial's start")

    def _fraction_done(self) -> float:
        return self._exits.total() / len(self._trials) if self._trials else 0.0


class CustomSearch(_CheckedSearch):
    """A :class:`SearchMethod` with all that a search needs around it."""

    def __init__(
        self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, cls: type[SearchMethod]
    ) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._source = f"the search method {cls.__name__}"
        self.event_kinds = frozenset(cls.event_kinds) | Search.event_kinds
        self._recorded: dict[str, Create] = {}
        """What the method created when it was told the event that it is told again, by request id."""
        self._created = 0
        self._method = cls(SearchSetup(searcher, hyperparameters, Random(seed), self._create))

    def _decide(self, event: Event) -> Iterator[Action]:
        return self._validated(self._ask(event))

    def _on_replay(self, event: Event, actions: Sequence[Action]) -> None:
        self._recorded = {action.request_id: action for action in actions if isinstance(action, Create)}
        decided = [action for action in self._ask(event) if not self._is_over(action)]
        self._recorded = {}
        end = [action for action in actions[len(decided) :] if isinstance(action, Shutdown)]  # by itself
        if [*decided, *end] != list(actions):
            logger.warning("%s decides otherwise now than it did; what was recorded stands", self._source)

    def _ask(self, event: Event) -> list[Action]:
        try:
            return list(self._method.handle(event))
        except Exception as e:
            raise SearchError(f"{self._source} failed at {event}: {type(e).__name__}: {e}") from e

    def _create(self, hparams: JSON | None) -> Create:
        # A method may create several before one is carried out, and a changed one fewer than are recorded.
        number = max(self._created, len(self._trials))
        self._created = number + 1
        drawn = self._create_trial(hparams, number)
        # The recorded one stands: its id is the one that trials and events go by. An earlier version drew others.
        kept = drawn.request_id if drawn.request_id in self._recorded else next(iter(self._recorded), None)
        return drawn if kept is None else self._recorded.pop(kept)

    def _is_over(self, action: Action) -> bool:
        trial = self._trials.get(getattr(action, "request_id", ""))
        return trial is not None and trial.exited is not None

    def _fraction_done(self) -> float:
        told = self._method.progress()
        return super()._fraction_done() if told is None else told


class RemoteSearch(_CheckedSearch):
    """The decisions are made elsewhere and sent as :class:`Posted`; nothing but that decides anything, nor ends it."""

    event_kinds = frozenset({"started", "trial_created", "completed", "validated", "progress", "exited", "posted"})
    _ends_with_its_trials = False
    _source = "the search outside the master"

    def _decide(self, event: Event) -> Iterator[Action]:
        return self._validated(event.actions if isinstance(event, Posted) else ())


def custom_search(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None
) -> Search:
    """The class that ``searcher.class`` names; without one, the decisions are sent to the master."""
    if searcher.get("class") is None:
        return RemoteSearch(searcher, hyperparameters, seed)
    return CustomSearch(searcher, hyperparameters, seed, _find_class(searcher["class"], folder))


def _find_class(name: Any, folder: str | None) -> type[SearchMethod]:
    """The class that ``"module:Class"`` names; its module is looked for in ``folder`` first."""
    if not isinstance(name, str) or name.count(":") != 1:
        raise SearchError(f"searcher.class is {name!r}; it must be 'module:Class'")
    module_name, class_name = name.split(":")
    try:
        file = None if folder is None else _find_file(Path(folder), module_name)
        module = importlib.import_module(module_name) if file is None else _load(module_name, file, str(folder))
    except Exception as e:
        raise SearchError(f"searcher.class {name!r} cannot be imported: {type(e).__name__}: {e}") from e
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, SearchMethod):
        raise SearchError(f"searcher.class {name!r} must be a class that inherits from det_core.search.SearchMethod")
    return cls


def _find_file(folder: Path, module_name: str) -> Path | None:
    stem = folder.joinpath(*module_name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _load(module_name: str, file: Path, folder: str) -> ModuleType:
    """Load an experiment's module under a name of its own, each time anew.

    Experiments whose modules have one name must not get each other's, nor what those import from beside them.
    """
    name = f"_det_core_search_{zlib.crc32(str(file).encode()):08x}_{module_name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules) | {name}
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for other in set(sys.modules) - before:
            origin = getattr(sys.modules[other], "__file__", None)
            if origin and Path(origin).is_relative_to(folder):
                del sys.modules[other]
    return module
