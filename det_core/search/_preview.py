"""Preview of a search: its trials, rungs and training, computed before it runs."""

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
from det_core.search._search import Search
from det_core.search._simulate import Simulation, simulate
from det_core.search._space import Space

SIMULATED_RUNS = 20
MAX_SIMULATED_TRIALS = 20_000
"""Trials simulated over all runs."""


def preview(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, *, folder: str | None = None
) -> JSON:
    """Describe a search: its brackets, their rungs, and how much will be trained.

    Searches by halving, and custom ones, are run in the simulator with trials that are better and worse by chance and
    stay so; those by halving several times, because it is chance, too, which trials meet on a rung.

    Args:
        searcher, hyperparameters, seed, folder: As for :func:`create_search`.

    Returns:
        ``{"method", "trials", "units", "units_range", "units_if_all_trained_fully", "brackets", "warnings"}``: how many
        trials there are; the mean, and ``[least, most]``, of the units trained in all (None: the configuration does
        not say how long a trial trains); each bracket as :meth:`Search.rungs` has it, where each rung has the mean
        number of trials that reach it as ``"trials"``, and ``[least, most]`` as ``"trials_range"``, instead of its
        entries; and settings that are probably mistakes.

    Raises:
        SearchError: If a custom method failed.
        ValueError: If the configuration cannot be used.
    """
    name = searcher["name"]
    # What a sampler proposes changes no number here, so Optuna need not be installed.
    if name == "optuna":
        searcher = {**searcher, "name": "random"}
    search = create_search(searcher, hyperparameters, seed, folder=folder)
    units: list[int] = []
    full: float | None = None
    brackets: list[JSON] = []
    if isinstance(search, RandomSearch):
        trials = search.max_trials
        if search.length is not None:
            units = [trials * search.length]
            full = units[0]
    else:
        runs = _simulate_runs(search, searcher, hyperparameters, seed, folder)
        trials = len(runs[0].trials)
        units = [run.units for run in runs]
        brackets = [_bracket(list(seen)) for seen in zip(*(run.search.rungs() for run in runs), strict=True)]
        if isinstance(search, HalvingSearch):
            full = trials * units_of(searcher["max_time" if is_time_based(searcher) else "max_length"])
    warnings = [text for bracket in brackets for text in _rung_warnings(bracket)]
    if isinstance(search, SingleSearch) and any(p.kind != "const" for p in Space(hyperparameters).parameters):
        warnings.append("the hyperparameters vary, and `single` has one trial: it gets values drawn at random")
    if brackets:
        warnings += _search_warnings(searcher, brackets)
    mean = None
    span = None
    if units:
        mean = fmean(units)
        span = [min(units), max(units)]
    return {
        "method": name,
        "trials": trials,
        "units": mean,
        "units_range": span,
        "units_if_all_trained_fully": full,
        "brackets": brackets,
        "warnings": warnings,
    }


def _simulate_runs(
    search: Search, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None
) -> list[Simulation]:
    count = 1
    if isinstance(search, HalvingSearch):
        count = max(1, min(SIMULATED_RUNS, MAX_SIMULATED_TRIALS // int(searcher["max_trials"])))
    return [_run(searcher, hyperparameters, (seed + i) % 2**32, folder) for i in range(count)]


def _run(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, folder: str | None) -> Simulation:
    def objective(hparams: JSON, length: int, number: int) -> float:
        return random.Random(f"{seed} {number}").random()

    return simulate(searcher, hyperparameters, seed, objective, folder=folder)


def _bracket(seen: list[JSON]) -> JSON:
    """Summarize one bracket of all runs."""
    rungs = []
    for same in zip(*(bracket["rungs"] for bracket in seen), strict=True):
        counts = [len(rung["entries"]) for rung in same]
        span = {"trials": fmean(counts), "trials_range": [min(counts), max(counts)]}
        rungs.append({"rung": same[0]["rung"], "length": same[0]["length"], **span})
    return {**seen[0], "rungs": rungs}


def _rung_warnings(bracket: JSON) -> list[str]:
    rungs = bracket["rungs"]
    where = f"bracket {bracket['bracket']}"
    same = [
        f"{where}: rungs {below['rung']} and {rung['rung']} have the same length, {rung['length']}: take fewer rungs, "
        "or a smaller unit for the length"
        for below, rung in pairwise(rungs)
        if rung["length"] == below["length"]
    ]
    empty = [
        f"{where}: rung {rung['rung']} (length {rung['length']}) is reached by "
        f"{'less than one trial on average' if rung['trials'] else 'no trial'}: max_trials is "
        f"{bracket['max_trials']} there, too few for {len(rungs)} rungs; take more, or fewer rungs"
        for rung in rungs
        if rung["trials"] < 1
    ]
    return same + empty


def _search_warnings(searcher: Mapping[str, Any], brackets: list[JSON]) -> list[str]:
    warnings = []
    concurrent = searcher.get("max_concurrent_trials") or 0
    if 0 < concurrent < len(brackets):
        warnings.append(
            f"max_concurrent_trials is {concurrent}, and there are {len(brackets)} brackets: one trial runs in each"
        )
    if is_time_based(searcher):
        metric = searcher["time_metric"]
        warnings.append(
            f"lengths and units are values of the validation metric {metric!r}, whatever it counts. A trial is judged "
            f"only when it reports a validation with {metric!r}, and until then trains on past its rung: these units "
            "are the least that will be trained"
        )
    return warnings
