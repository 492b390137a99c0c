"""The mean of nested dictionaries of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Reading = dict[str, Any]
"""Numbers, or dictionaries of such, by name."""


class Mean:
    """Takes samples and gives each number's mean over the samples that had it."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], tuple[float, int]] = {}

    def add(self, sample: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
        """Take one more sample; samples need not have the same numbers."""
        for key, value in sample.items():
            where = (*path, key)
            if isinstance(value, Mapping):
                self.add(value, where)
            else:
                total, count = self._sums.get(where, (0.0, 0))
                self._sums[where] = (total + value, count + 1)

    def take(self) -> Reading:
        """Return the means, nested as the samples were, and begin anew."""
        means: Reading = {}
        for path, (total, count) in self._sums.items():
            level = means
            for key in path[:-1]:
                level = level.setdefault(key, {})
            level[path[-1]] = total / count
        self._sums.clear()
        return means
