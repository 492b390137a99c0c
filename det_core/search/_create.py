"""Creation of a search from the configuration's section ``searcher``."""

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
    """Return the search of a configuration, before its first event.

    Args:
        searcher: Section ``searcher`` of the configuration; missing keys have the wire contract's defaults.
        hyperparameters: Section ``hyperparameters``.
        seed: ``reproducibility.experiment_seed``.
        folder: Directory searched first for the module of a custom method: the experiment's own files. The module is
            loaded anew each time, and may import modules beside it.

    Raises:
        SearchError: If the method is unknown, or the class of a custom one cannot be used.
        ValueError: If a value cannot be used; the message names it.
        MissingExtra: If the method needs a package that is not installed.
    """
    name = searcher.get("name")
    if name == "custom":
        return custom_search(searcher, hyperparameters, seed, folder)
    if name not in _METHODS:
        names = ", ".join(sorted([*_METHODS, "custom"]))
        raise SearchError(f"searcher.name={name!r}: expected one of {names}")
    return _METHODS[name](searcher, hyperparameters, seed)
