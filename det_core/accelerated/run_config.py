"""What a run was started with, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "dict[str, Any]": (dict, "a dictionary"),
}
_FROM_0, _FROM_1 = {"least": 0}, {"least": 1}


@dataclass(frozen=True)
class TrainerRunConfig:
    """The settings of a training or evaluation run. A field is also read as ``config["num_epochs"]``.

    Attributes:
        num_epochs: how many epochs the run has.
        train_per_device_batch_size: records in a training batch of one process; None: not known, or no training.
        train_dl_kwargs: the arguments of the training loader.
        eval_per_device_batch_size: records in an evaluation batch of one process; None: not known, or no evaluation.
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

    Raises:
        TypeError: a value is of another type than its field; the message names the field.
        ValueError: a number is too small.
    """

    num_epochs: int = field(metadata=_FROM_0)
    train_per_device_batch_size: int | None = field(metadata=_FROM_1)
    train_dl_kwargs: dict[str, Any] | None
    eval_per_device_batch_size: int | None = field(metadata=_FROM_1)
    eval_dl_kwargs: dict[str, Any] | None
    gradient_accumulation_steps: int = field(metadata=_FROM_1)
    gradient_clip_value: float | None = field(metadata=_FROM_0)
    train_total_batch_size: int | None = field(metadata=_FROM_1)
    eval_total_batch_size: int | None = field(metadata=_FROM_1)
    num_update_steps_per_epoch: int | None = field(metadata=_FROM_0)
    num_local_update_steps_per_epoch: int | None = field(metadata=_FROM_0)
    max_num_train_steps: int | None = field(metadata=_FROM_0)
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int = field(metadata=_FROM_1)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), str(f.type), f.metadata.get("least"))

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """All fields in a new dictionary; the loaders' arguments are copied, and the objects in them are the same."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def _check(name: str, value: Any, declared: str, least: int | None) -> None:
    """That a value is of the type its field is declared with, and not too small."""
    kind = declared.removesuffix(" | None")
    if kind not in _KINDS or (value is None and kind != declared):  # a subclass may add fields of other types
        return
    wanted, words = _KINDS[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        none = " or None" if kind != declared else ""
        raise TypeError(f"{name} must be {words}{none}, not {value!r}")
    if least is not None and not value >= least:  # NaN is not
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
