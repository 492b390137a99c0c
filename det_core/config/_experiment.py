"""Configuration of an experiment, checked and complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from det_core._length import split_length

T = TypeVar("T")
_PREEMPTION_TIMEOUT = 3600.0


class _ConfigValue(Generic[T]):
    """Descriptor for the value at a path of the configuration; None if the kind of section has no such key."""

    def __init__(self, *path: str) -> None:
        self._path = path

    def __get__(self, experiment: Experiment, owner: type[Experiment]) -> T:
        value: Any = experiment.data
        for key in self._path:
            value = value.get(key)
        return cast(T, value)


@dataclass(frozen=True)
class Experiment:
    """Result of :func:`det_core.config.parse_experiment`; do not change its content.

    ``Experiment(data)`` restores a stored one. The properties are values of the keys of those names in
    `docs/reference-experiment.md`.

    Attributes:
        data: The whole configuration with all defaults, of JSON's types alone; trials get it as ``config``.
        warnings: Warnings for the user, one sentence each.
    """

    data: dict[str, Any]
    warnings: Sequence[str] = ()

    name = _ConfigValue[str]("name")
    description = _ConfigValue["str | None"]("description")
    entrypoint = _ConfigValue["str | list[str] | None"]("entrypoint")
    max_restarts = _ConfigValue[int]("max_restarts")
    slots_per_trial = _ConfigValue[int]("resources", "slots_per_trial")
    max_slots = _ConfigValue["int | None"]("resources", "max_slots")
    priority = _ConfigValue["int | None"]("resources", "priority")
    save_experiment_best = _ConfigValue[int]("checkpoint_storage", "save_experiment_best")
    save_trial_best = _ConfigValue[int]("checkpoint_storage", "save_trial_best")
    save_trial_latest = _ConfigValue[int]("checkpoint_storage", "save_trial_latest")
    hyperparameters = _ConfigValue[dict[str, Any]]("hyperparameters")
    searcher = _ConfigValue[dict[str, Any]]("searcher")
    metric = _ConfigValue[str]("searcher", "metric")
    smaller_is_better = _ConfigValue[bool]("searcher", "smaller_is_better")
    time_metric = _ConfigValue["str | None"]("searcher", "time_metric")
    source_trial_id = _ConfigValue["int | None"]("searcher", "source_trial_id")
    source_checkpoint_uuid = _ConfigValue["str | None"]("searcher", "source_checkpoint_uuid")
    seed = _ConfigValue[int]("reproducibility", "experiment_seed")

    @property
    def max_units(self) -> int | None:
        """Maximum units that a trial trains in all, of ``max_length`` or ``max_time``; None without either."""
        length = self.searcher.get("max_length")
        if length is None:
            length = self.searcher.get("max_time")
        units, _ = split_length(length)
        if units is None:
            return None
        return int(units)

    @property
    def unit(self) -> str | None:
        """``batches``, ``records``, ``epochs``, or the metric that counts; None if only the script knows the unit."""
        _, unit = split_length(self.searcher.get("max_length"))
        return unit or self.time_metric or self.searcher.get("unit")

    @property
    def preemption_timeout(self) -> float:
        """Seconds that a trial has to save and exit before it is killed."""
        timeout: float | None = self.data["preemption_timeout"]
        # 0 is a timeout of its own: kill at once.
        if timeout is None:
            return _PREEMPTION_TIMEOUT
        return timeout

    def environment_variables_for(self, device: str) -> dict[str, str]:
        """Return the variables to set for trials on slots of a kind: ``cpu``, ``cuda`` or ``rocm``."""
        # A value may contain more of them: only the first sign ends the name.
        lines: list[str] = self.data["environment"]["environment_variables"][device]
        return {name: value for name, _, value in (line.partition("=") for line in lines)}
