"""From the configuration's section ``searcher`` to a search."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from det_core.errors import SearchError
from det_core.search._search import Search

_METHODS = {
    "single": ("det_core.search._plain", "RandomSearch"),
    "random": ("det_core.search._plain", "RandomSearch"),
    "grid": ("det_core.search._plain", "GridSearch"),
    "async_halving": ("det_core.search._halving", "halving_search"),
    "adaptive_asha": ("det_core.search._halving", "halving_search"),
    "custom": ("det_core.search._custom", "custom_search"),
    "optuna": ("det_core.search._optuna", "OptunaSearch"),
}
"""Name -> the module that has it and what makes it; imported when it is used."""


def create_search(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, *, folder: str | None = None
) -> Search:
    """The search that a configuration asks for, before its first event.

    Args:
        searcher: the configuration's section ``searcher``; what is left out has the wire contract's default.
        hyperparameters: its section ``hyperparameters``.
        seed: its ``reproducibility.experiment_seed``, 0 to 2**32 - 1.
        folder: where the module of a custom method is looked for first: the experiment's own files.

    Raises:
        SearchError: there is no such method, or the class of a custom one cannot be used.
        ValueError: a value cannot be used; the message names it.
        MissingExtra: the method needs a package that is not installed.
    """
    name = searcher.get("name")
    if name not in _METHODS:
        raise SearchError(f"searcher.name is {name!r}; there are {', '.join(sorted(_METHODS))}")
    module, factory = _METHODS[name]
    make = getattr(importlib.import_module(module), factory)
    search: Search = (
        make(searcher, hyperparameters, seed, folder) if name == "custom" else make(searcher, hyperparameters, seed)
    )
    return search
