"""Settings of a run, and values derived from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TrainerRunConfig:
    """Settings of a training or evaluation run. ``config["num_epochs"]`` reads a field too.

    Attributes:
        num_epochs: number of epochs of the run.
        train_per_device_batch_size: records in a training batch of one process; the requested number if the loader has
            none.
        train_dl_kwargs: arguments of the training loader.
        eval_per_device_batch_size: records in an evaluation batch of one process, likewise.
        eval_dl_kwargs: arguments of the evaluation loader.
        gradient_accumulation_steps: number of batches whose gradients make an update.
        gradient_clip_value: maximum absolute value of gradients, or None.
        train_total_batch_size: records in an update, of all processes and accumulated batches together.
        eval_total_batch_size: records in an evaluation step of all processes.
        num_update_steps_per_epoch: updates in an epoch, counted in one stream over **all processes**; None if the
            loader has no length.
        num_local_update_steps_per_epoch: updates of one process in an epoch; None if the loader has no length.
        max_num_train_steps: number of updates of all processes after which the run ends; None if unknown. By default
            larger than the run, so that the number of epochs ends it.
        is_local_process_zero: whether this process is the first on its node.
        is_world_process_zero: whether this process is the first of all.
        is_distributed: whether there are several processes.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        num_processes: number of training processes.
    """

    num_epochs: int
    train_per_device_batch_size: int
    train_dl_kwargs: dict[str, Any] | None
    eval_per_device_batch_size: int
    eval_dl_kwargs: dict[str, Any] | None
    gradient_accumulation_steps: int
    gradient_clip_value: float | None
    train_total_batch_size: int
    eval_total_batch_size: int
    num_update_steps_per_epoch: int | None
    num_local_update_steps_per_epoch: int | None
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in a new dictionary, with shallow copies of the loaders' arguments."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: copy.copy(value) for name, value in values.items()}
