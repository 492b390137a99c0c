"""What a run was started with, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TrainerRunConfig:
    """The settings of a training or evaluation run. A field is also read as ``config["num_epochs"]``.

    Attributes:
        num_epochs: how many epochs the run has.
        train_per_device_batch_size: records in a training batch of one process; as asked for, where no loader says it.
        train_dl_kwargs: the arguments of the training loader.
        eval_per_device_batch_size: records in an evaluation batch of one process, likewise.
        eval_dl_kwargs: the arguments of the evaluation loader.
        gradient_accumulation_steps: batches whose gradients make an update.
        gradient_clip_value: gradients are cut off beyond this, on either side; None: they are not.
        train_total_batch_size: records in an update: of all processes and accumulated batches together.
        eval_total_batch_size: records in an evaluation step of all processes.
        num_update_steps_per_epoch: updates in an epoch, those of **all processes** added up; None: the loader has no
            length.
        num_local_update_steps_per_epoch: updates in an epoch of one process; None: the loader has no length.
        max_num_train_steps: updates, counted over all processes, after which the run ends; None: nobody knows of any.
        is_local_process_zero: whether this process is the first on its node.
        is_world_process_zero: whether it is the first of all.
        is_distributed: whether there are several.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        num_processes: how many processes train.
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
        """All fields in a new dictionary; the loaders' arguments are copied, and the objects in them are the same."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
