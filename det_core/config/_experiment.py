"""An experiment's configuration, checked and complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
_PREEMPTION_TIMEOUT = 3600.0


class _ConfigValue(Generic[T]):
    """Reads the value at a path of the configuration; None where a kind of section has no such key."""

    def __init__(self, *path: str) -> None:
        self._path = path

    def __get__(self, experiment: Experiment, owner: type[Experiment]) -> T:
        value: Any = experiment.data
        for key in self._path:
            value = value.get(key)
        return cast(T, value)


@dataclass(frozen=True)
class Experiment:
    """What :func:`det_core.config.parse_experiment` has read. To be taken as it is: nobody changes what is in it.

    One that was stored is made again from its data: ``Experiment(data)``. The properties are values of the keys of
    those names in `docs/reference-experiment.md`.

    Attributes:
        data: the whole configuration with every default filled in: what trials get as ``config``. Made of what JSON
            has, and nothing else.
        warnings: what the user should know, one sentence each.
    """

    data: dict[str, Any]
    warnings: Sequence[str] = ()

    name = _ConfigValue[str]("name")
    description = _ConfigValue["str | None"]("description")
    labels = _ConfigValue[list[str]]("labels")
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
    def preemption_timeout(self) -> float:
        """Seconds that a trial has to save and exit before it is killed."""
        given: float | None = self.data["preemption_timeout"]
        return _PREEMPTION_TIMEOUT if given is None else given

    def environment_variables_for(self, device: str) -> dict[str, str]:
        """What to set for trials on slots of that kind: ``cpu``, ``cuda`` or ``rocm``."""
        lines: list[str] = self.data["environment"]["environment_variables"][device]
        return {name: value for name, _, value in (line.partition("=") for line in lines)}
