"""The hyperparameters of a configuration: what may be sampled, and in which order (wire contract 11.2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from det_core.search._random import RandomState

JSON = dict[str, Any]
Draw = Callable[[RandomState], Any]
_MUTABLE = (dict, list)


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter that varies or is constant."""

    path: tuple[str, ...]
    """Its name, within the names of the objects it is nested in."""
    kind: str
    """const, int, double, log or categorical."""
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)


class Space:
    """All hyperparameters, in sorted order, nested ones within their object."""

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        """Read them.

        Args:
            hyperparameters: the configuration's section.

        Raises:
            ValueError: one of them cannot be sampled; the message names it.
        """
        self._tree = hyperparameters
        self.parameters = list(_leaves(hyperparameters, ()))
        for parameter in self.parameters:
            _check(parameter)
        self._draw = _drawing_all(hyperparameters)

    def sample(self, random: RandomState) -> JSON:
        """One value for each."""
        values: JSON = self._draw(random)
        return values

    def filled(self, values: Mapping[str, Any]) -> JSON:
        """The hyperparameters of a trial, from the value of each by its dotted name."""
        return _filled(self._tree, values, ())


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Parameter]:
    for name in sorted(tree):
        spec, path = tree[name], (*above, name)
        if not isinstance(spec, Mapping):
            yield Parameter(path, "const", {"val": spec})
        elif "type" in spec:
            yield Parameter(path, str(spec["type"]), spec)
        else:
            yield from _leaves(spec, path)


def _check(parameter: Parameter) -> None:
    spec, where = parameter.spec, f"hyperparameters.{parameter.name}"
    needs = {
        "const": ["val"], "categorical": ["vals"], "int": ["minval", "maxval"], "double": ["minval", "maxval"],
        "log": ["base", "minval", "maxval"],
    }  # fmt: skip
    if parameter.kind not in needs:
        raise ValueError(f"{where}: there is no type {parameter.kind!r}; there are {', '.join(sorted(needs))}")
    if missing := [key for key in needs[parameter.kind] if key not in spec]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if parameter.kind == "categorical" and not spec["vals"]:
        raise ValueError(f"{where}: vals is empty")
    if "minval" in spec and not spec["minval"] < spec["maxval"]:
        raise ValueError(f"{where}: minval {spec['minval']} must be less than maxval {spec['maxval']}")
    if parameter.kind == "log" and not spec["base"] > 0:
        raise ValueError(f"{where}: base must be positive, and is {spec['base']}")


def _drawing_all(tree: Mapping[str, Any]) -> Draw:
    draws = [(name, _drawing(tree[name])) for name in sorted(tree)]

    def draw(random: RandomState) -> JSON:
        return {name: one(random) for name, one in draws}

    return draw


def _drawing(spec: Any) -> Draw:
    """What draws a value of one hyperparameter; made once, since it is called for every trial."""
    if isinstance(spec, Mapping) and "type" not in spec:
        return _drawing_all(spec)
    kind, spec = (str(spec["type"]), spec) if isinstance(spec, Mapping) else ("const", {"val": spec})
    if kind == "const":
        value = spec["val"]
        return (lambda random: copy.deepcopy(value)) if isinstance(value, _MUTABLE) else (lambda random: value)
    if kind == "categorical":
        vals, count = list(spec["vals"]), len(spec["vals"])
        pick = _drawing_integer(0, count)
        if any(isinstance(value, _MUTABLE) for value in vals):
            return lambda random: copy.deepcopy(vals[pick(random)])
        return lambda random: vals[pick(random)]
    low, high = spec["minval"], spec["maxval"]
    if kind == "int":
        return _drawing_integer(low, high + 1)
    low, span = float(low), float(high) - float(low)
    if kind == "double":
        return lambda random: low + span * random.random()
    base = float(spec["base"])
    return lambda random: math.pow(base, low + span * random.random())


def _drawing_integer(low: int, high: int) -> Draw:
    """As ``RandomState.randint``, with what does not change worked out once."""
    span = high - low - 1
    if not 0 < span < 2**32:
        return lambda random: random.randint(low, high)
    mask = (1 << span.bit_length()) - 1

    def draw(random: RandomState) -> int:
        while (value := random.getrandbits(32) & mask) > span:
            pass
        return low + value

    return draw


def _filled(tree: Mapping[str, Any], values: Mapping[str, Any], above: tuple[str, ...]) -> JSON:
    filled: JSON = {}
    for name in sorted(tree):
        spec, path = tree[name], (*above, name)
        if isinstance(spec, Mapping) and "type" not in spec:
            filled[name] = _filled(spec, values, path)
        else:
            value = values[".".join(path)]
            filled[name] = copy.deepcopy(value) if isinstance(value, _MUTABLE) else value
    return filled
