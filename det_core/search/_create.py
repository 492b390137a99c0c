"""From the configuration's section ``searcher`` to a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from det_core.errors import SearchError
from det_core.search._custom import custom_search
from det_core.search._halving import halving_search
from det_core.search._optuna import OptunaSearch
from det_core.search._plain import GridSearch, RandomSearch, SingleSearch
from det_core.search._search import Search

_METHODS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], Search]] = {
    "single": SingleSearch,
    "random": RandomSearch,
    "grid": GridSearch,
    "async_halving": halving_search,
    "adaptive_asha": halving_search,
    "optuna": OptunaSearch,
}


def create_search(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, *, folder: str | None = None
) -> Search:
    """The search that a configuration asks for, before its first event.

    Args:
        searcher: the configuration's section ``searcher``; what is left out has the wire contract's default.
        hyperparameters: its section ``hyperparameters``.
        seed: its ``reproducibility.experiment_seed``.
        folder: where the module of a custom method is looked for first: the experiment's own files. It is loaded anew
            each time, and may import modules beside it.

    Raises:
        SearchError: there is no such method, or the class of a custom one cannot be used.
        ValueError: a value cannot be used; the message names it.
        MissingExtra: the method needs a package that is not installed.
    """
    name = searcher.get("name")
    if name == "custom":
        return custom_search(searcher, hyperparameters, seed, folder)
    if name not in _METHODS:
        raise SearchError(f"searcher.name is {name!r}; there are {', '.join(sorted([*_METHODS, 'custom']))}")
    return _METHODS[name](searcher, hyperparameters, seed)
