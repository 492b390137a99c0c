"""An experiment's configuration, checked and complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_PREEMPTION_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Experiment:
    """What :func:`det_core.config.parse_experiment` has read. To be taken as it is: nobody changes what is in it.

    One that was stored is made again from its data: ``Experiment(data)``.

    Attributes:
        data: the whole configuration with every default filled in: what trials get as ``config``. Made of what JSON
            has, and nothing else.
        warnings: what the user should know, one sentence each.
    """

    data: dict[str, Any]
    warnings: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Its name; made up if the file has none."""
        return str(self.data["name"])

    @property
    def description(self) -> str | None:
        """A sentence for people."""
        return _maybe(self.data["description"])

    @property
    def labels(self) -> list[str]:
        """Words to find it by."""
        return list(self.data["labels"])

    @property
    def entrypoint(self) -> str | list[str] | None:
        """What to run, as written; see :func:`det_core.config.entrypoint_command`. None: of an unmanaged one."""
        found: str | list[str] | None = self.data["entrypoint"]
        return found

    @property
    def max_restarts(self) -> int:
        """After how many failures, in all, another one ends a trial."""
        return int(self.data["max_restarts"])

    @property
    def slots_per_trial(self) -> int:
        """How many slots each trial gets."""
        return int(self.data["resources"]["slots_per_trial"])

    @property
    def max_slots(self) -> int | None:
        """How many slots all its trials may have at once; None: all."""
        found: int | None = self.data["resources"]["max_slots"]
        return found

    @property
    def priority(self) -> int | None:
        """From 1, which comes first, to 99; None: the master's default."""
        found: int | None = self.data["resources"]["priority"]
        return found

    @property
    def environment_variables(self) -> dict[str, str]:
        """What to set for trials that run without a GPU; see :meth:`environment_variables_for`."""
        return self.environment_variables_for("cpu")

    def environment_variables_for(self, device: str) -> dict[str, str]:
        """What to set for trials on slots of that kind: ``cpu``, ``cuda`` or ``rocm``."""
        lines: list[str] = self.data["environment"]["environment_variables"][device]
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    @property
    def preemption_timeout(self) -> float:
        """Seconds that a trial has to save and exit before it is killed."""
        found = self.data["preemption_timeout"]
        return DEFAULT_PREEMPTION_TIMEOUT if found is None else float(found)

    @property
    def checkpoint_storage(self) -> dict[str, Any] | None:
        """Where checkpoints go; None: where the master's default says."""
        found: dict[str, Any] = self.data["checkpoint_storage"]
        return found if found["type"] is not None else None

    @property
    def save_experiment_best(self) -> int:
        """How many checkpoints stay at the end because they are the best of the experiment."""
        return int(self.data["checkpoint_storage"]["save_experiment_best"])

    @property
    def save_trial_best(self) -> int:
        """How many checkpoints of each trial stay at the end because they are its best."""
        return int(self.data["checkpoint_storage"]["save_trial_best"])

    @property
    def save_trial_latest(self) -> int:
        """How many checkpoints of each trial stay at the end because they are its latest."""
        return int(self.data["checkpoint_storage"]["save_trial_latest"])

    @property
    def searcher(self) -> dict[str, Any]:
        """The section ``searcher``, complete."""
        found: dict[str, Any] = self.data["searcher"]
        return found

    @property
    def metric(self) -> str:
        """The validation metric that the search goes by."""
        return str(self.searcher["metric"])

    @property
    def smaller_is_better(self) -> bool:
        """Which end of the metric is best."""
        return bool(self.searcher["smaller_is_better"])

    @property
    def time_metric(self) -> str | None:
        """The validation metric that tells how far a trial is, where the search goes by that instead of operations."""
        return _maybe(self.searcher.get("time_metric"))

    @property
    def source_trial_id(self) -> int | None:
        """The trial whose latest checkpoint every trial starts from."""
        found: int | None = self.searcher["source_trial_id"]
        return found

    @property
    def source_checkpoint_uuid(self) -> str | None:
        """The checkpoint that every trial starts from, unless there is a :attr:`source_trial_id`."""
        return _maybe(self.searcher["source_checkpoint_uuid"])

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The section ``hyperparameters``; each is an object with its ``type``, or a nested one without."""
        found: dict[str, Any] = self.data["hyperparameters"]
        return found

    @property
    def seed(self) -> int:
        """The seed of its search."""
        return int(self.data["reproducibility"]["experiment_seed"])


def _maybe(value: Any) -> str | None:
    return None if value is None else str(value)
