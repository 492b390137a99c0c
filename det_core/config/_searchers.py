"""The section ``searcher`` (wire contract, section 11.1)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from det_core.config._rules import (
    AnyObject,
    Count,
    Flag,
    Length,
    LengthOfOne,
    Name,
    Positive,
    integer,
    number,
    one_of,
    text,
)
from det_core.config._section import Cross, Kinds, Section, option

NAMES = ("single", "random", "grid", "async_halving", "adaptive_asha", "optuna", "custom")
SAMPLERS = ("tpe", "gp", "cmaes", "random", "qmc", "nsgaii")
MAX_TRIALS = 1_000_000
Trials = Annotated[int, integer(1, MAX_TRIALS)]
Rungs = Annotated[int, integer(1, 100)]
_FORMER = dict.fromkeys(("sync_halving", "adaptive", "adaptive_simple"), "searches of that kind are adaptive_asha now")


class _Searcher(Section):
    """What all searchers have."""

    name: str = option(..., "which searcher")
    metric: Name = option(..., "the validation metric that the search goes by")
    smaller_is_better: Flag = option(True, "which end of the metric is best")
    source_trial_id: Count | None = option(None, "every trial starts from the latest checkpoint of this trial")
    source_checkpoint_uuid: Name | None = option(
        None, "every trial starts from this checkpoint, unless there is a `source_trial_id`"
    )


class _Concurrent(_Searcher):
    max_concurrent_trials: Annotated[int, integer(0, MAX_TRIALS)] = option(
        16, "how many trials are there at once; 0: as many as the method likes"
    )


class Single(_Searcher):
    """One trial."""

    name: Literal["single"] = option(..., "`single`")
    max_length: Length | None = option(None, "how long each trial trains")


class Random(_Concurrent):
    """Trials with random hyperparameters."""

    name: Literal["random"] = option(..., "`random`")
    max_length: Length | None = option(None, "how long each trial trains")
    max_trials: Trials = option(..., "how many trials there are")


class Grid(_Concurrent):
    """A trial for each point of a grid: each `int`, `double` and `log` hyperparameter needs a `count`."""

    name: Literal["grid"] = option(..., "`grid`")
    max_length: Length | None = option(None, "how long each trial trains")


class Halving(_Concurrent):
    """What the methods by successive halving have.

    How far trials train is told either by ``max_length``, and then they are told by operations; or by ``time_metric``
    and ``max_time``, and then they are stopped by the validations that they report.
    """

    max_length: LengthOfOne | None = option(None, "how long the best trials train; or give `time_metric`")
    time_metric: Name | None = option(None, "the validation metric that tells how far a trial is, as `batches`")
    max_time: Positive | None = option(None, "up to which value of `time_metric` the best trials train")
    max_trials: Trials = option(..., "how many trials there are")
    divisor: Annotated[float, number(above=1, most=1000)] = option(4, "one of so many trials goes on at each rung")
    stop_once: Flag = option(
        False, "stop the others for good, instead of letting them wait for a promotion; by `time_metric`: always"
    )

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        if given.get("time_metric") is not None and given.get("max_time") is None:
            yield Cross(("max_time",), "an integer of at least 1, as there is a time_metric")
        elif given.get("time_metric") is None and given.get("max_time") is not None:
            yield Cross(("time_metric",), "the name of the validation metric that max_time is about")
        elif given.get("max_length") is None and given.get("max_time") is None:
            yield Cross(("max_length",), "how long to train at most: an integer of at least 1, {batches: N}, …")


class AsyncHalving(Halving):
    """Asynchronous successive halving."""

    name: Literal["async_halving"] = option(..., "`async_halving`")
    num_rungs: Rungs = option(..., "how many rungs there are")


class AdaptiveAsha(Halving):
    """Several brackets of asynchronous successive halving."""

    name: Literal["adaptive_asha"] = option(..., "`adaptive_asha`")
    mode: Annotated[str, one_of("standard", "aggressive", "conservative")] = option(
        "standard", "how early trials are stopped"
    )
    max_rungs: Rungs = option(5, "how many rungs a bracket has at most")
    bracket_rungs: list[Rungs] = option([], "how many rungs each bracket has; empty: made from the others")


class Optuna(_Concurrent):
    """Hyperparameters proposed by a sampler of Optuna's, which learns from the trials before."""

    name: Literal["optuna"] = option(..., "`optuna`")
    sampler: Annotated[str, one_of(*SAMPLERS)] = option("tpe", "which of Optuna's samplers")
    sampler_options: AnyObject = option({}, "arguments of the sampler")
    max_length: Length | None = option(None, "how long each trial trains")
    max_trials: Trials = option(..., "how many trials there are")


class Custom(_Searcher):
    """A method of your own: a class, which gets all other keys too, or a program that talks to the master."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"] = option(..., "`custom`")
    class_: Annotated[str, text("a text of the form module:Class", r"[\w.]+:\w+")] | None = option(
        None, "the class, as `module:Class`; without one, a program outside steers the search", alias="class"
    )
    unit: Annotated[str, one_of("batches", "records", "epochs")] | None = option(None, "what lengths are counted in")


class UnknownSearcher(_Searcher):
    """A searcher whose name says nothing: what can be said of it nevertheless."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, one_of(*NAMES, instead=_FORMER)] = option(..., "which searcher")


SEARCHERS: dict[str, type[Section]] = {
    "single": Single,
    "random": Random,
    "grid": Grid,
    "async_halving": AsyncHalving,
    "adaptive_asha": AdaptiveAsha,
    "optuna": Optuna,
    "custom": Custom,
    "": UnknownSearcher,
}


def _which(given: Any) -> str:
    name = given.get("name") if isinstance(given, Mapping) else None
    return name if isinstance(name, str) else ""


Searcher = Annotated[Any, Kinds(lambda: SEARCHERS, _which)]


_WHY_NOT = {
    ("single", "max_trials"): "it is one trial",
    ("single", "max_concurrent_trials"): "it is one trial",
    ("grid", "max_trials"): "it tries every point",
}


def of_another_searcher(key: str, section: type[BaseModel]) -> str | None:
    """What to say of a key that a searcher does not have, but others have; None: it is no such key."""
    name = next((name for name, cls in SEARCHERS.items() if cls is section and name), None)
    others = [other for other, cls in SEARCHERS.items() if other and key in cls.model_fields]
    if name is None or not others:
        return None
    why = _WHY_NOT.get((name, key))
    return f"{name} takes no {key}: {why}" if why else f"{name} takes no {key}; {', '.join(others)} do"


def with_a_searcher(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A file with the searcher that a wrong name probably means; None: it is right, of former times, or no idea."""
    searcher = given.get("searcher")
    name = searcher.get("name") if isinstance(searcher, Mapping) else None
    if not isinstance(name, str) or not isinstance(searcher, Mapping) or name in (*NAMES, *_FORMER):
        return None
    meant = difflib.get_close_matches(name.lower(), NAMES, 1, 0.6)
    return {**given, "searcher": {**searcher, "name": meant[0]}} if meant else None
