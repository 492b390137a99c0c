"""What a search method of your own is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core.search._actions import Action, Create
from det_core.search._events import Event
from det_core.search._random import RandomState

JSON = dict[str, Any]


@dataclass(frozen=True)
class SearchSetup:
    """What a method is made with."""

    searcher: Mapping[str, Any]
    """The configuration's section ``searcher``, with your own keys."""
    hyperparameters: Mapping[str, Any]
    """Its section ``hyperparameters``."""
    random: RandomState
    """The experiment's random numbers: ``randint(low, high)``, ``uniform(low, high)``, ``random()``."""
    create: Callable[[JSON | None], Create]
    """What :meth:`SearchMethod.create` calls."""


class SearchMethod(ABC):
    """Inherit, write :meth:`handle`, and name the class in the configuration.

    ::

        searcher: {name: custom, class: "my_search:MySearch", metric: loss}

    The method must be deterministic: take random numbers from ``self.random`` only, and look at no clock and no file.
    Then a search that is recovered after a crash goes on as if nothing had happened. What it has decided before the
    crash stands in any case.
    """

    uses: frozenset[str] = frozenset({"started", "completed", "exited"})
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
        """A new trial, to be returned by :meth:`handle`.

        Args:
            hparams: its hyperparameters; None: drawn at random from the configuration's.
        """
        return self._create(hparams)

    def progress(self) -> float | None:
        """How much of the search is done, 0 to 1; None: the share of the trials that are over."""
        return None

    def snapshot(self) -> Any:
        """The state, for JSON and :meth:`restore`. A master never asks: a search is told all its events again."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what :meth:`snapshot` gave."""
        raise NotImplementedError(f"{type(self).__name__} has snapshot() and no restore()")
