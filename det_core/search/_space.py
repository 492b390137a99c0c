"""The hyperparameters of a configuration: drawn at random, or as the points of a grid (wire contract 11.2)."""

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
    """One hyperparameter: its name within the objects it is nested in, its type, and all that is said of it."""

    path: tuple[str, ...]
    kind: str
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    def draw(self, rng: random.Random) -> Any:
        """A value at random, each as likely; of a logarithmic one, each exponent."""
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
        """Its values on a grid."""
        spec = self.spec
        if self.kind in ("const", "categorical"):
            return [spec["val"]] if self.kind == "const" else list(spec["vals"])
        if spec.get("count") is None:
            raise ValueError(f"hyperparameters.{self.name}: a grid needs `count` for the type {self.kind}")
        low, high, count = spec["minval"], spec["maxval"], int(spec["count"])
        if count < 1:
            raise ValueError(f"hyperparameters.{self.name}: count must be at least 1, and is {count}")
        if self.kind == "int":
            count = min(count, high - low + 1)
        points = [low + i * (high - low) / (count - 1) for i in range(count)] if count > 1 else [low + (high - low) / 2]
        if self.kind == "int":  # half away from zero
            return [math.floor(point + 0.5) if point >= 0 else math.ceil(point - 0.5) for point in points]
        return points if self.kind == "double" else [math.pow(spec["base"], point) for point in points]


class Space:
    """All hyperparameters, in sorted order, nested ones within their object.

    Args:
        hyperparameters: the configuration's section.

    Raises:
        ValueError: one of them cannot be drawn; the message names it.
    """

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        self.parameters: list[Parameter] = []
        self._tree = self._read(hyperparameters, ())

    def sample(self, rng: random.Random) -> JSON:
        """A trial's hyperparameters, drawn at random."""
        return self.fill(lambda parameter: parameter.draw(rng))

    def fill(self, value_of: Callable[[Parameter], Any]) -> JSON:
        """A trial's hyperparameters, with what ``value_of`` says of each."""
        return _filled(self._tree, value_of)

    def _read(self, tree: Mapping[str, Any], above: tuple[str, ...]) -> JSON:
        read: JSON = {}
        for name in sorted(tree):
            spec = tree[name]
            if isinstance(spec, Mapping) and "type" not in spec:
                read[name] = self._read(spec, (*above, name))
                continue
            kind, spec = (str(spec["type"]), spec) if isinstance(spec, Mapping) else ("const", {"val": spec})
            read[name] = Parameter((*above, name), kind, spec)
            _check(read[name])
            self.parameters.append(read[name])
        return read


class Grid:
    """Every combination, worked out when asked for: a grid may have more of them than fit into memory.

    Raises:
        ValueError: a hyperparameter has no ``count`` and needs one.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._axes = {parameter.path: parameter.axis() for parameter in space.parameters}

    def __len__(self) -> int:
        return math.prod(map(len, self._axes.values()))

    def __getitem__(self, index: int) -> JSON:
        """A combination; the last axis varies fastest."""
        values = {}
        for path, axis in reversed(self._axes.items()):
            index, place = divmod(index, len(axis))
            values[path] = axis[place]
        return self._space.fill(lambda parameter: values[parameter.path])


def _filled(tree: JSON, value_of: Callable[[Parameter], Any]) -> JSON:
    filled: JSON = {}
    for name, part in tree.items():
        value = value_of(part) if isinstance(part, Parameter) else _filled(part, value_of)
        # Trials must not share a list: a script may change its own.
        filled[name] = copy.deepcopy(value) if isinstance(value, (list, dict)) else value
    return filled


def _check(parameter: Parameter) -> None:
    spec, where = parameter.spec, f"hyperparameters.{parameter.name}"
    if parameter.kind not in _REQUIRED_KEYS:
        raise ValueError(f"{where}: there is no type {parameter.kind!r}; there are {', '.join(sorted(_REQUIRED_KEYS))}")
    if missing := [key for key in _REQUIRED_KEYS[parameter.kind] if key not in spec]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if parameter.kind == "categorical" and not spec["vals"]:
        raise ValueError(f"{where}: vals is empty")
    if "minval" in spec and not spec["minval"] < spec["maxval"]:
        raise ValueError(f"{where}: minval {spec['minval']} must be less than maxval {spec['maxval']}")
    if parameter.kind == "log" and not spec["base"] > 0:
        raise ValueError(f"{where}: base must be positive, and is {spec['base']}")
