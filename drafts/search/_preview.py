"""What a search will do, before it does it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from det_core.search._brackets import timed
from det_core.search._create import create_search
from det_core.search._grid import Grid
from det_core.search._lengths import units_of
from det_core.search._simulate import Simulation, simulate

JSON = dict[str, Any]
ENOUGH = 20_000
"""Trials to simulate, over all runs."""
RUNS = 20


def preview(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, *, folder: str | None = None
) -> JSON:
    """Describe a search: its brackets, their rungs, and how much will be trained.

    Searches by halving, and custom ones, are run in the simulator with trials that are better and worse by chance and
    stay so, and the means are told.

    Args:
        searcher, hyperparameters, seed, folder: as :func:`create_search` gets them.

    Returns:
        ``{"method", "trials", "units", "units_if_all_trained_fully", "brackets", "warnings"}``: the mean numbers of
        trials and of units that are trained in all (None: the configuration does not say how long a trial trains);
        each bracket as :meth:`Search.rungs` has it, with the mean number of trials that reach each rung as
        ``"trials"`` instead of its entries; and what is probably not as it was meant.

    Raises:
        SearchError: a custom method failed, or is a program that this one does not see.
        ValueError: the configuration cannot be used.
    """
    name = searcher["name"]
    if name in ("single", "random", "grid", "optuna"):
        return _plain(searcher, hyperparameters, seed)
    if name == "custom" and searcher.get("class") is None:
        raise ValueError("this search is steered by a program outside, which is not run here: nothing to preview")
    halving = name in ("async_halving", "adaptive_asha")
    runs = 1
    if halving:
        runs = max(1, min(RUNS, ENOUGH // int(searcher["max_trials"])))
    done = [_run(searcher, hyperparameters, (seed + i) % 2**32, folder) for i in range(runs)]
    trials = sum(len(run.trials) for run in done) / runs
    full = trials * units_of(searcher["max_time" if timed(searcher) else "max_length"]) if halving else None
    brackets = [_bracket(done, number) for number in range(len(done[0].search.rungs()))]
    return {
        "method": name,
        "trials": trials,
        "units": sum(run.units for run in done) / runs,
        "units_if_all_trained_fully": full,
        "brackets": brackets,
        "warnings": [text for bracket in brackets for text in _remarks(bracket)] + _on_slots(searcher, brackets),
    }


def _plain(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> JSON:
    create_search({**searcher, "name": "random", "max_trials": 1}, hyperparameters, seed)
    trials, warnings = 1, []
    if searcher["name"] == "grid":
        trials = len(Grid(hyperparameters))
    elif searcher["name"] != "single":
        trials = int(searcher["max_trials"])
    length = searcher.get("max_length")
    units = None if length is None else trials * units_of(length)
    if searcher["name"] == "single" and _varies(hyperparameters):
        warnings.append("the hyperparameters vary, and `single` has one trial: it gets values drawn at random")
    return {
        "method": searcher["name"],
        "trials": trials,
        "units": units,
        "units_if_all_trained_fully": units,
        "brackets": [],
        "warnings": warnings,
    }


def _varies(hyperparameters: Mapping[str, Any]) -> bool:
    from det_core.search._space import Space

    return any(parameter.kind != "const" for parameter in Space(hyperparameters).parameters)


def _run(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None) -> Simulation:
    dice = random.Random(seed)
    quality: list[float] = []

    def metric_of(hparams: JSON, length: int, number: int) -> float:
        while len(quality) <= number:
            quality.append(dice.random())
        return quality[number]

    return simulate(searcher, hyperparameters, seed, metric_of, folder=folder)


def _bracket(done: list[Simulation], number: int) -> JSON:
    """One bracket, with the mean of the runs."""
    seen = [run.search.rungs()[number] for run in done]
    rungs = [
        {
            "rung": rung["rung"],
            "length": rung["length"],
            "trials": sum(len(one["rungs"][i]["entries"]) for one in seen) / len(seen),
        }
        for i, rung in enumerate(seen[0]["rungs"])
    ]
    return {**seen[0], "rungs": rungs}


def _remarks(bracket: JSON) -> list[str]:
    rungs, where = bracket["rungs"], f"bracket {bracket['bracket']}"
    found = []
    for below, rung in pairwise(rungs):
        if rung["length"] == below["length"]:
            found.append(
                f"{where}: rungs {below['rung']} and {rung['rung']} have the same length, {rung['length']}: "
                "take fewer rungs, or a smaller unit for the length"
            )
    if empty := [rung["rung"] for rung in rungs if rung["trials"] == 0]:
        found.append(
            f"{where}: no trial reaches rung {empty[0]} (length {rungs[empty[0]]['length']}): "
            f"max_trials is {bracket['max_trials']} there, too few for {len(rungs)} rungs; take more, or fewer rungs"
        )
    return found


def _on_slots(searcher: Mapping[str, Any], brackets: list[JSON]) -> list[str]:
    asked = searcher.get("max_concurrent_trials") or 0
    if brackets and 0 < asked < len(brackets):
        return [f"max_concurrent_trials is {asked}, and there are {len(brackets)} brackets: one trial runs in each"]
    return []
