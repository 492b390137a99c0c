"""What a search will do, before it does it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

from det_core.search._create import create_search
from det_core.search._events import JSON
from det_core.search._halving import HalvingSearch, is_time_based
from det_core.search._plain import RandomSearch, SingleSearch, units_of
from det_core.search._simulate import Simulation, simulate
from det_core.search._space import Space

SIMULATED_RUNS = 20
MAX_SIMULATED_TRIALS = 20_000
"""Trials to simulate, over all runs."""


def preview(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, *, folder: str | None = None
) -> JSON:
    """Describe a search: its brackets, their rungs, and how much will be trained.

    Searches by halving, and custom ones, are run in the simulator with trials that are better and worse by chance and
    stay so; those by halving several times, as who meets whom on a rung is chance too.

    Args:
        searcher, hyperparameters, seed, folder: as :func:`create_search` gets them.

    Returns:
        ``{"method", "trials", "units", "units_range", "units_if_all_trained_fully", "brackets", "warnings"}``: how many
        trials there are; the mean, and ``[least, most]``, of the units trained in all (None: the configuration does
        not say how long a trial trains); each bracket as :meth:`Search.rungs` has it, where each rung has the mean
        number of trials that reach it as ``"trials"``, and ``[least, most]`` as ``"trials_range"``, instead of its
        entries; and what is probably not as it was meant.

    Raises:
        SearchError: a custom method failed.
        ValueError: the configuration cannot be used, or a program elsewhere steers the search.
    """
    name = searcher["name"]
    if name == "custom" and searcher.get("class") is None:
        raise ValueError("this search is steered by a program outside, which is not run here: nothing to preview")
    # What a sampler proposes changes no number here, so Optuna need not be installed.
    plain = {**searcher, "name": "random"} if name == "optuna" else searcher
    search = create_search(plain, hyperparameters, seed, folder=folder)
    if isinstance(search, RandomSearch):
        trials, length = search.max_trials, search.length
        units = [] if length is None else [trials * length]
        full: float | None = units[0] if units else None
        brackets: list[JSON] = []
    else:
        halving = isinstance(search, HalvingSearch)
        runs = max(1, min(SIMULATED_RUNS, MAX_SIMULATED_TRIALS // int(searcher["max_trials"]))) if halving else 1
        done = [_run(searcher, hyperparameters, (seed + i) % 2**32, folder) for i in range(runs)]
        trials, units = len(done[0].trials), [run.units for run in done]
        full = trials * units_of(searcher["max_time" if is_time_based(searcher) else "max_length"]) if halving else None
        brackets = [_bracket(list(seen)) for seen in zip(*(run.search.rungs() for run in done), strict=True)]
    warnings = [text for bracket in brackets for text in _on_rungs(bracket)]
    if isinstance(search, SingleSearch) and any(p.kind != "const" for p in Space(hyperparameters).parameters):
        warnings.append("the hyperparameters vary, and `single` has one trial: it gets values drawn at random")
    if brackets:
        warnings += _on_all(searcher, brackets)
    return {
        "method": name,
        "trials": trials,
        "units": fmean(units) if units else None,
        "units_range": [min(units), max(units)] if units else None,
        "units_if_all_trained_fully": full,
        "brackets": brackets,
        "warnings": warnings,
    }


def _run(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None) -> Simulation:
    def objective(hparams: JSON, length: int, number: int) -> float:
        return random.Random(f"{seed} {number}").random()

    return simulate(searcher, hyperparameters, seed, objective, folder=folder)


def _bracket(seen: list[JSON]) -> JSON:
    """One bracket, from what became of it in each run."""
    rungs = []
    for same in zip(*(bracket["rungs"] for bracket in seen), strict=True):
        counts = [len(rung["entries"]) for rung in same]
        span = {"trials": fmean(counts), "trials_range": [min(counts), max(counts)]}
        rungs.append({"rung": same[0]["rung"], "length": same[0]["length"], **span})
    return {**seen[0], "rungs": rungs}


def _on_rungs(bracket: JSON) -> list[str]:
    rungs, where = bracket["rungs"], f"bracket {bracket['bracket']}"
    same = [
        f"{where}: rungs {below['rung']} and {rung['rung']} have the same length, {rung['length']}: take fewer rungs, "
        "or a smaller unit for the length"
        for below, rung in pairwise(rungs)
        if rung["length"] == below["length"]
    ]
    empty = [
        f"{where}: rung {rung['rung']} (length {rung['length']}) is reached by "
        f"{'no trial' if not rung['trials'] else 'less than one trial on average'}: max_trials is "
        f"{bracket['max_trials']} there, too few for {len(rungs)} rungs; take more, or fewer rungs"
        for rung in rungs
        if rung["trials"] < 1
    ]
    return same + empty


def _on_all(searcher: Mapping[str, Any], brackets: list[JSON]) -> list[str]:
    found = []
    asked = searcher.get("max_concurrent_trials") or 0
    if 0 < asked < len(brackets):
        found.append(
            f"max_concurrent_trials is {asked}, and there are {len(brackets)} brackets: one trial runs in each"
        )
    if is_time_based(searcher):
        metric = searcher["time_metric"]
        found.append(
            f"lengths and units are values of the validation metric {metric!r}, whatever it counts. A trial is judged "
            f"only when it reports a validation with {metric!r}, and until then trains on past its rung: these units "
            "are the least that will be trained"
        )
    return found
