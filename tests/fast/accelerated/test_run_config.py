"""The run's configuration: its types, and its copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from det_core.accelerated.run_config import TrainerRunConfig

FIELDS: dict[str, Any] = {
    "num_epochs": 2, "train_per_device_batch_size": 8, "train_dl_kwargs": {"sampler": object()},
    "eval_per_device_batch_size": None, "eval_dl_kwargs": None, "gradient_accumulation_steps": 1,
    "gradient_clip_value": None, "train_total_batch_size": 8, "eval_total_batch_size": None,
    "num_update_steps_per_epoch": 5, "num_local_update_steps_per_epoch": 5, "max_num_train_steps": 11,
    "is_local_process_zero": True, "is_world_process_zero": True, "is_distributed": False, "mixed_precision": "no",
    "num_processes": 1,
}  # fmt: skip


def test_fields_in_order_and_by_name() -> None:
    config = TrainerRunConfig(**FIELDS)
    assert [f.name for f in dataclasses.fields(config)] == list(FIELDS)
    assert all(config[name] == FIELDS[name] == getattr(config, name) for name in FIELDS)
    with pytest.raises(KeyError, match="to_dict"):
        config["to_dict"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_epochs = 3  # type: ignore[misc]


def test_the_dictionary_is_a_copy_also_without_evaluation() -> None:
    config = TrainerRunConfig(**FIELDS)
    copy = config.to_dict()
    assert copy == FIELDS and copy["train_dl_kwargs"]["sampler"] is FIELDS["train_dl_kwargs"]["sampler"]
    copy["num_epochs"] = 9
    copy["train_dl_kwargs"]["shuffle"] = True
    assert config.num_epochs == 2 and list(config["train_dl_kwargs"]) == ["sampler"], "the config is not altered"


UNKNOWN_LENGTH = ("num_update_steps_per_epoch", "num_local_update_steps_per_epoch", "max_num_train_steps")


def test_a_loader_without_length() -> None:
    config = TrainerRunConfig(**{**FIELDS, **dict.fromkeys(UNKNOWN_LENGTH)})
    assert all(config[name] is None for name in UNKNOWN_LENGTH)


def test_numbers_of_numpy_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    config = TrainerRunConfig(**{**FIELDS, "num_epochs": np.int64(3), "gradient_clip_value": np.float32(0.5)})
    assert config.num_epochs == 3


def test_a_subclass_may_add_fields() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wider(TrainerRunConfig):
        world: set[int] = dataclasses.field(default_factory=set)

    assert Wider(**FIELDS, world={1}).to_dict() == {**FIELDS, "world": {1}}
