"""User-defined search methods."""

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
from det_core.search._events import JSON, Action, Close, Create, Event, Shutdown, Stop, TrainTo
from det_core.search._search import Search, Trial

logger = logging.getLogger("det_core.search")


@dataclass(frozen=True)
class SearchSetup:
    """Arguments of a search method."""

    searcher: Mapping[str, Any]
    """Section ``searcher`` of the configuration, with your own keys."""
    hyperparameters: Mapping[str, Any]
    """Section ``hyperparameters`` of the configuration."""
    random: Random
    """Random numbers for the method alone, seeded by the experiment's seed."""
    create: Callable[[JSON | None], Create]
    """Implementation of :meth:`SearchMethod.create`."""


class SearchMethod(ABC):
    """Base of your own search method: implement :meth:`handle`, and name the class in the configuration.

    ::

        searcher: {name: custom, class: "my_search:MySearch", metric: loss}

    A search that is recovered after a crash of its master receives all its events again, from the first. So the method
    must be deterministic: take random numbers from ``self.random`` only, and read no clock and no file. Decisions made
    before the crash stand in any case. Under a master it runs in a process of its own, so :meth:`handle` may take long.
    """

    event_kinds: frozenset[str] = frozenset({"started", "completed", "exited"})
    """Kinds of events that it receives; add "validated", "progress" or "trial_created" as needed."""

    def __init__(self, setup: SearchSetup) -> None:
        """Store the arguments; a subclass with its own ``__init__`` calls this first."""
        self.searcher = setup.searcher
        self.hyperparameters = setup.hyperparameters
        self.random = setup.random
        self._create = setup.create

    @abstractmethod
    def handle(self, event: Event) -> Sequence[Action]:
        """Decide on an event.

        Args:
            event: Next event; the first one is ``Started()``.

        Returns:
            The actions to carry out. Each trial has one operation at a time. The search ends when all its trials are
            over and none was created.
        """

    def create(self, hparams: JSON | None = None) -> Create:
        """Return a new trial, to be returned by the same call of :meth:`handle`.

        Args:
            hparams: Its hyperparameters. Defaults to a random draw from the configuration's.
        """
        return self._create(hparams)

    def progress(self) -> float | None:
        """Return the fraction of the search that is done, 0 to 1; None: the fraction of trials that are over."""
        return None


class CustomSearch(Search):
    """Search whose decisions, which may be invalid, a :class:`SearchMethod` makes."""

    def __init__(
        self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, cls: type[SearchMethod]
    ) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._source = f"search method {cls.__name__}"
        self.event_kinds = frozenset(cls.event_kinds) | Search.event_kinds
        self._recorded: dict[str, Create] = {}
        """Trials recorded with the event that is being replayed, by request ID."""
        self._created = 0
        self._method = cls(SearchSetup(searcher, hyperparameters, Random(seed), self._create))

    def _decide(self, event: Event) -> Iterator[Action]:
        return self._validated(self._ask(event))

    def _on_replay(self, event: Event, actions: Sequence[Action]) -> None:
        self._recorded = {action.request_id: action for action in actions if isinstance(action, Create)}
        decided = [action for action in self._ask(event) if not self._is_over(action)]
        self._recorded = {}
        # The base class decides the end of a search whose trials are over, and records it behind the method's actions.
        end = [action for action in actions[len(decided) :] if isinstance(action, Shutdown)]
        if [*decided, *end] != list(actions):
            logger.warning("%s decided differently on replay; keeping the recorded decisions", self._source)

    def _ask(self, event: Event) -> list[Action]:
        try:
            return list(self._method.handle(event))
        except Exception as e:
            raise SearchError(f"{self._source} failed at {event}: {type(e).__name__}: {e}") from e

    def _create(self, hparams: JSON | None) -> Create:
        # A method may create several before one is applied, and a changed one fewer than are recorded.
        number = max(self._created, len(self._trials))
        self._created = number + 1
        drawn = self._create_trial(hparams, number)
        if drawn.request_id in self._recorded:
            return self._recorded.pop(drawn.request_id)
        # An earlier version drew other IDs. The recorded ones stand, because trials and events go by them.
        for request_id in self._recorded:
            return self._recorded.pop(request_id)
        return drawn

    def _is_over(self, action: Action) -> bool:
        trial = self._trials.get(getattr(action, "request_id", ""))
        return trial is not None and trial.exited is not None

    def _fraction_done(self) -> float:
        fraction = self._method.progress()
        if fraction is None:
            return self._exits.total() / max(len(self._trials), 1)
        return fraction

    def _validated(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the actions, without those for trials that are over.

        Raises:
            SearchError: If an action is for an unknown trial, creates one twice, or gives an impossible length.
        """
        for action in actions:
            if isinstance(action, Create):
                if action.request_id in self._trials:
                    raise SearchError(f"{self._source} created trial {action.request_id} twice")
            elif isinstance(action, (TrainTo, Close, Stop)):
                trial = self._trials.get(action.request_id)
                if trial is None:
                    raise SearchError(f"{self._source} decided on trial {action.request_id}, which it has not created")
                # The method need not remember which trials have exited.
                if trial.exited is not None:
                    continue
                if isinstance(action, TrainTo):
                    self._check_length(action, trial)
            yield action

    def _check_length(self, action: TrainTo, trial: Trial) -> None:
        where = f"{self._source} made trial {action.request_id} train to {action.length}"
        if trial.closed:
            raise SearchError(f"{where} after closing it")
        if trial.length is not None:
            raise SearchError(f"{where} before it completed {trial.length}")
        if action.length <= trial.done:
            raise SearchError(f"{where} after it completed {trial.done}: lengths count from the trial's start")


def custom_search(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None
) -> Search:
    """Return a search by the class that ``searcher.class`` names."""
    return CustomSearch(searcher, hyperparameters, seed, _find_class(searcher.get("class"), folder))


def _find_class(name: Any, folder: str | None) -> type[SearchMethod]:
    """Return the class that ``"module:Class"`` names; its module is looked for in ``folder`` first."""
    if not isinstance(name, str) or name.count(":") != 1:
        raise SearchError(f"searcher.class={name!r}: expected 'module:Class'")
    module_name, class_name = name.split(":")
    try:
        module = _import(module_name, folder)
    except Exception as e:
        raise SearchError(f"cannot import searcher.class={name!r}: {type(e).__name__}: {e}") from e
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, SearchMethod):
        raise SearchError(f"searcher.class={name!r}: expected a class that inherits from det_core.search.SearchMethod")
    return cls


def _import(module_name: str, folder: str | None) -> ModuleType:
    if folder is not None:
        stem = Path(folder).joinpath(*module_name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return _load(module_name, file, folder)
    return importlib.import_module(module_name)


def _load(module_name: str, file: Path, folder: str) -> ModuleType:
    """Load an experiment's module anew, under a name of its own, and return it.

    Experiments whose modules have one name must not get each other's, nor what those import from beside them.
    """
    name = f"_det_core_search_{zlib.crc32(str(file).encode()):08x}_{module_name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python module: {file}")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules) | {name}
    # pickle and dataclasses look up a class's module by its name.
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
