"""Hyperparameters of a configuration, drawn at random or as the points of a grid (wire contract 11.2)."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from det_core.search._events import JSON

_REQUIRED_KEYS = {
    "const": ["val"],
    "categorical": ["vals"],
    "int": ["minval", "maxval"],
    "double": ["minval", "maxval"],
    "log": ["base", "minval", "maxval"],
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyperparameter.

    Attributes:
        path: Its name, behind those of the objects it is nested in.
        kind: Its ``type``.
        spec: Its object in the configuration.
    """

    path: tuple[str, ...]
    kind: str
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    def draw(self, rng: random.Random) -> Any:
        """Return a random value, each as likely; of a logarithmic parameter, each exponent as likely."""
        spec = self.spec
        match self.kind:
            case "const":
                return spec["val"]
            case "categorical":
                return rng.choice(spec["vals"])
            case "int":
                return rng.randint(spec["minval"], spec["maxval"])
            case "double":
                return rng.uniform(spec["minval"], spec["maxval"])
            case _:
                return math.pow(spec["base"], rng.uniform(spec["minval"], spec["maxval"]))

    def axis(self) -> list[Any]:
        """Return the values on a grid.

        Raises:
            ValueError: If ``count`` is missing or below 1.
        """
        spec = self.spec
        if self.kind == "const":
            return [spec["val"]]
        if self.kind == "categorical":
            return list(spec["vals"])
        if spec.get("count") is None:
            raise ValueError(f"hyperparameters.{self.name}: a grid needs `count` for the type {self.kind}")
        count = int(spec["count"])
        if count < 1:
            raise ValueError(f"hyperparameters.{self.name}: count must be at least 1, and is {count}")
        low = spec["minval"]
        high = spec["maxval"]
        if self.kind == "int":
            count = min(count, high - low + 1)
        if count == 1:
            points = [low + (high - low) / 2]
        else:
            points = [low + i * (high - low) / (count - 1) for i in range(count)]
        if self.kind == "int":
            return list(map(_round_away_from_zero, points))
        if self.kind == "log":
            return [math.pow(spec["base"], point) for point in points]
        return points


def _round_away_from_zero(number: float) -> int:
    # As the wire contract has it; Python's round() takes a half to the even neighbor.
    if number >= 0:
        return math.floor(number + 0.5)
    return math.ceil(number - 0.5)


class Space:
    """All hyperparameters, in sorted order, nested ones within their object.

    Args:
        hyperparameters: Section of the configuration.

    Raises:
        ValueError: If one of them cannot be drawn; the message names it.
    """

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        self.parameters: list[Parameter] = []
        self._tree = self._read(hyperparameters, ())

    def sample(self, rng: random.Random) -> JSON:
        """Return a trial's hyperparameters, drawn at random."""
        return self.fill(lambda parameter: parameter.draw(rng))

    def fill(self, value_of: Callable[[Parameter], Any]) -> JSON:
        """Return a trial's hyperparameters with ``value_of(parameter)`` for each."""
        return _fill(self._tree, value_of)

    def _read(self, tree: Mapping[str, Any], above: tuple[str, ...]) -> JSON:
        read: JSON = {}
        # Sorted: the n-th draw belongs to the same hyperparameter, however the file orders them.
        for name in sorted(tree):
            spec = tree[name]
            path = (*above, name)
            if not isinstance(spec, Mapping):
                parameter = Parameter(path, "const", {"val": spec})
            elif "type" in spec:
                parameter = Parameter(path, str(spec["type"]), spec)
            else:
                read[name] = self._read(spec, path)
                continue
            _check(parameter)
            read[name] = parameter
            self.parameters.append(parameter)
        return read


class Grid:
    """Every combination, computed on access: a grid may have more of them than fit into memory.

    Raises:
        ValueError: If a hyperparameter needs a ``count`` and has none.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._axes = {parameter.path: parameter.axis() for parameter in space.parameters}

    def __len__(self) -> int:
        return math.prod(map(len, self._axes.values()))

    def __getitem__(self, index: int) -> JSON:
        """Return a combination; the last axis varies fastest."""
        values = {}
        for path, axis in reversed(self._axes.items()):
            index, place = divmod(index, len(axis))
            values[path] = axis[place]
        return self._space.fill(lambda parameter: values[parameter.path])


def _fill(tree: JSON, value_of: Callable[[Parameter], Any]) -> JSON:
    filled: JSON = {}
    for name, part in tree.items():
        if isinstance(part, Parameter):
            value = value_of(part)
            # Trials must not share a list: a script may change its own.
            if isinstance(value, (list, dict)):
                value = copy.deepcopy(value)
        else:
            value = _fill(part, value_of)
        filled[name] = value
    return filled


def _check(parameter: Parameter) -> None:
    spec = parameter.spec
    where = f"hyperparameters.{parameter.name}"
    if parameter.kind not in _REQUIRED_KEYS:
        raise ValueError(
            f"{where}: unknown type {parameter.kind!r}; expected one of {', '.join(sorted(_REQUIRED_KEYS))}"
        )
    if missing := [key for key in _REQUIRED_KEYS[parameter.kind] if key not in spec]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if parameter.kind == "categorical" and not spec["vals"]:
        raise ValueError(f"{where}: vals is empty")
    if "minval" in spec and not spec["minval"] < spec["maxval"]:
        raise ValueError(f"{where}: minval {spec['minval']} must be less than maxval {spec['maxval']}")
    if parameter.kind == "log" and not spec["base"] > 0:
        raise ValueError(f"{where}: base must be positive, and is {spec['base']}")
