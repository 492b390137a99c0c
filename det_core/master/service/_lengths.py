"""How long the trials of an experiment may train, and in what that is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core._length import split_length

if TYPE_CHECKING:
    from det_core.config import Experiment


def longest(spec: Experiment) -> int | None:
    """How many units a trial may come to train in all, as the configuration says it."""
    length = spec.searcher.get("max_length")
    if length is None:
        length = spec.searcher.get("max_time")
    units, _ = split_length(length)
    return None if units is None else int(units)


def unit(spec: Experiment) -> str | None:
    """``batches``, ``records``, ``epochs``, or the metric that counts; None: the script counts in what it likes."""
    _, name = split_length(spec.searcher.get("max_length"))
    return name or spec.time_metric or spec.searcher.get("unit")
