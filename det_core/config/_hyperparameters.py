"""The section ``hyperparameters`` (wire contract, section 11.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import ConfigDict, RootModel

from det_core.config._rules import Anything, Number, Positive, Rule, demand, integer, number, one_of
from det_core.config._section import Cross, Kinds, Section, option

TYPES = ("const", "int", "double", "log", "categorical")
_INSTEAD = {"float": "did you mean double?", "choice": "did you mean categorical?"}
COUNTED = ("int", "double", "log")
Exact = Annotated[int, integer(-(2**53), 2**53)]
"""An integer that a float can hold: a grid computes with floats."""
MAX_GRID = 100_000
"""How many points a grid may have."""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Range(Section):
    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        low, high = given.get("minval"), given.get("maxval")
        if _is_number(low) and _is_number(high) and not low < high:
            yield Cross(("minval",), f"less than maxval, which is {high}")
        elif _is_number(low) and _is_number(high) and not math.isfinite(float(high) - float(low)):
            yield Cross(("minval",), f"so close to maxval, which is {high}, that their difference is a finite number")


class Const(Section):
    """Always the same. Also written as the value alone."""

    type: Literal["const"] = option(..., "`const`")
    val: Anything = option(..., "the value")


class Int(_Range):
    """An integer between two, both included."""

    type: Literal["int"] = option(..., "`int`")
    minval: Exact = option(..., "the smallest")
    maxval: Exact = option(..., "the largest")
    count: Positive | None = option(None, "how many values a grid takes of it")


class Double(_Range):
    """A number between two."""

    type: Literal["double"] = option(..., "`double`")
    minval: Number = option(..., "the smallest")
    maxval: Number = option(..., "the largest")
    count: Positive | None = option(None, "how many values a grid takes of it")


class Log(_Range):
    """A power of `base`, whose exponent lies between two."""

    type: Literal["log"] = option(..., "`log`")
    base: Annotated[float, number(above=0)] = option(..., "what is raised to the power")
    minval: Number = option(..., "the smallest exponent")
    maxval: Number = option(..., "the largest exponent")
    count: Positive | None = option(None, "how many values a grid takes of it")

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        yield from super().cross(given)
        base = given.get("base")
        for key in ("minval", "maxval"):
            exponent = given.get(key)
            if _is_number(base) and base > 0 and _is_number(exponent) and not _has_power(base, exponent):
                allowed = f"an exponent, so that {base} to the power of it is a number above 0, and finite"
                yield Cross((key,), allowed, "give the logarithm of the value")


def _has_power(base: float, exponent: float) -> bool:
    try:
        power: float = float(base) ** exponent
        return 0 < power < math.inf
    except OverflowError:
        return False


def _some(given: Any) -> list[Any]:
    demand(isinstance(given, list) and len(given) > 0)
    return list(given)


class Categorical(Section):
    """One of several values."""

    type: Literal["categorical"] = option(..., "`categorical`")
    vals: Annotated[list[Any], Rule("a list of at least one value", _some)] = option(..., "the values")


class UnknownHyperparameter(Section):
    """A hyperparameter whose type says nothing."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, one_of(*TYPES, instead=_INSTEAD)] = option(..., "which kind")


class Nested(RootModel[dict[str, "Hyperparameter"]]):
    """Hyperparameters by name; an object without ``type`` is an object of hyperparameters again."""


KINDS: dict[str, Any] = {
    "const": Const,
    "int": Int,
    "double": Double,
    "log": Log,
    "categorical": Categorical,
    "nested": Nested,
    "": UnknownHyperparameter,
}


def _which(given: Any) -> str:
    if "type" not in given:
        return "nested"
    return given["type"] if given["type"] in TYPES else ""


def _explicit(given: Any) -> Any:
    return given if isinstance(given, Mapping) else {"type": "const", "val": given}


Hyperparameter = Annotated[Any, Kinds(lambda: KINDS, _which, before=_explicit)]
Nested.model_rebuild()


def grid_mistakes(given: Any) -> Iterator[Cross]:
    """What keeps the hyperparameters, as a user wrote them, from being a grid."""
    points = 1
    for path, hyperparameter in _leaves(given, ()):
        kind, count = hyperparameter.get("type"), hyperparameter.get("count")
        if kind in COUNTED and count is None:
            yield Cross((*path, "count"), "an integer of at least 1, for the grid")
        elif kind in COUNTED and type(count) is int and count >= 1:
            points *= min(count, _integers(hyperparameter)) if kind == "int" else count
        elif kind == "categorical" and isinstance(vals := hyperparameter.get("vals"), list):
            points *= max(len(vals), 1)
    if points > MAX_GRID:
        yield Cross((), f"a grid of at most {MAX_GRID:,} points: these make {points:,}")


def _integers(hyperparameter: Mapping[str, Any]) -> int:
    low, high = hyperparameter.get("minval"), hyperparameter.get("maxval")
    return max(high - low + 1, 1) if type(low) is int and type(high) is int else MAX_GRID


def _leaves(given: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if not isinstance(given, Mapping):
        return
    for name, value in given.items():
        if isinstance(value, Mapping) and "type" in value:
            yield (*path, name), value
        else:
            yield from _leaves(value, (*path, name))
