"""Every combination of the hyperparameters (wire contract 11.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from det_core.search._space import Parameter, Space


class Grid:
    """A sequence of combinations, made one by one: the last axis varies fastest."""

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        """Lay it out.

        Raises:
            ValueError: a hyperparameter cannot be used, or has no ``count`` and needs one.
        """
        self.axes = {parameter.name: axis(parameter) for parameter in Space(hyperparameters).parameters}

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.axes.values())

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The value of each hyperparameter by its dotted name."""
        values = {}
        for name, axis_values in reversed(self.axes.items()):
            index, place = divmod(index, len(axis_values))
            values[name] = axis_values[place]
        return values


def axis(parameter: Parameter) -> list[Any]:
    """The values of one hyperparameter."""
    spec, kind = parameter.spec, parameter.kind
    if kind == "const":
        return [spec["val"]]
    if kind == "categorical":
        return list(spec["vals"])
    if spec.get("count") is None:
        raise ValueError(f"hyperparameters.{parameter.name}: a grid needs `count` for the type {kind}")
    low, high, count = spec["minval"], spec["maxval"], int(spec["count"])
    if count < 1:
        raise ValueError(f"hyperparameters.{parameter.name}: count must be at least 1, and is {count}")
    if kind == "int":
        return [_rounded(value) for value in _spaced(low, high, min(count, high - low + 1))]
    if kind == "double":
        return _spaced(low, high, count)
    return [math.pow(spec["base"], exponent) for exponent in _spaced(low, high, count)]


def _spaced(low: float, high: float, count: int) -> list[float]:
    if count == 1:
        return [low + (high - low) / 2.0]
    return [low + i * (high - low) / (count - 1) for i in range(count)]


def _rounded(value: float) -> int:
    """Half away from zero."""
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)
