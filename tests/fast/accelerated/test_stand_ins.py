"""Stand-ins for the Trainer, accelerators and optimizers; schedulers and run configs of the user's own."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

torch = pytest.importorskip("torch")

from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated._strategy import Strategy  # noqa: E402
from det_core.accelerated.callbacks import (  # noqa: E402
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    WSDCheckpointCallback,
)
from det_core.accelerated.run_config import TrainerRunConfig  # noqa: E402
from det_core.accelerated.schedulers import WSDLrScheduler  # noqa: E402
from support.trainings import a_trainer, rows, train  # noqa: E402


class Recorder:
    """Has the public names of a Trainer that these callbacks use, and no more."""

    def __init__(self, scheduler: Any = None) -> None:
        self.scheduler = scheduler
        self.run_config = SimpleNamespace(is_world_process_zero=True)
        self.saved: list[str] = []

    def save_training_state(self, path: Path, more: Any) -> None:
        path.mkdir(parents=True)
        self.saved.append(path.name)

    def save_checkpoint(self, path: Path, more: Any, save_optimizer: bool, save_scheduler: bool) -> None:
        self.saved.append(path.name)

    def print(self, *args: Any) -> None: ...


class Periods:
    """A schedule of the user's own: eight updates at one rate, of which two are called a decay."""

    def __init__(self, optimizer: Any = None) -> None:
        self.done = 0

    def step(self) -> None:
        self.done += 1

    def get_current_step(self) -> int:
        return self.done - 1

    def get_checkpoint_steps(self) -> list[int]:
        return [8]

    def get_phase_info(self, step: int) -> dict[str, int]:
        return {"period_start": 0, "period_end": 8, "pre_decay_step": 6}

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def test_save_training_state_callback_of_a_stand_in_saves_and_rotates(tmp_path: Path) -> None:
    callback = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, max_checkpoints=1)
    trainer = Recorder()
    callback.on_training_run_start(trainer)
    for step in range(5):
        callback.on_train_step_end(trainer, batch=None, batch_output=None, step=step)
    callback.on_training_run_end(trainer)
    assert trainer.saved == ["step_2", "step_4", "final"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    mock = MagicMock()
    for step in range(2):
        callback.on_train_step_end(mock, batch=None, batch_output=None, step=step)
    mock.save_training_state.assert_called_once()


@pytest.mark.parametrize("schedule", [Periods, partial(WSDLrScheduler, total_steps=8, decay_phase_ratio=0.25)])
def test_wsd_checkpoint_callback_of_a_stand_in_saves_once_at_each_end(tmp_path: Path, schedule: Any) -> None:
    callback = WSDCheckpointCallback(tmp_path)
    trainer = Recorder(schedule(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)))
    callback.on_training_run_start(trainer)
    for step in range(16):  # two batches to an update
        callback.on_train_step_end(trainer, batch=None, batch_output=None, step=step)
        if step % 2:
            trainer.scheduler.step()
    assert trainer.saved == ["checkpoint_6_wsd_pre_decay"]
    callback.on_training_run_end(trainer)
    assert trainer.saved == ["checkpoint_6_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt"]


def test_wsd_checkpoint_callback_asks_a_users_scheduler_for_its_phase(tmp_path: Path) -> None:
    callback = WSDCheckpointCallback(tmp_path)
    train(a_trainer(callbacks=[callback]), 2, create_scheduler_fn=Periods)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint_6_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt",
    ]  # fmt: skip
    state = torch.load(tmp_path / "checkpoint_6_wsd_pre_decay" / "custom_checkpoint_0.pkl", weights_only=True)
    assert state == {"done": 6}


def test_other_callbacks_of_a_stand_in_do_what_they_are_for() -> None:
    trainer = MagicMock()
    StepBasedEvaluationCallback(2).on_train_step_end(trainer, step=2)
    trainer._run_eval_epoch.assert_called_once()
    nan = TerminateOnNaNCallback()
    nan.on_train_step_end(trainer, batch_output={"loss": torch.tensor(1.0)})
    with pytest.raises(StopTrainingError, match="NaN loss in training step"):
        nan.on_train_step_end(trainer, batch_output={"loss": torch.tensor(float("nan"))})


def test_run_config_set_by_hand_is_heeded() -> None:
    class ByHand(Trainer):
        def _create_run_config(self, *args: Any) -> TrainerRunConfig:
            return dataclasses.replace(super()._create_run_config(*args), is_distributed=True, num_processes=4)

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {**super().calculate_train_batch_loss(batch), "num_items_in_batch": 10}

        def backward_step(self, loss: torch.Tensor) -> None:
            shares.append(round(loss.item() / self.batch_loss, 3))
            super().backward_step(loss)

    shares: list[float] = []
    trainer = train(a_trainer(ByHand), 1, max_num_train_steps=8, gradient_accumulation_steps=2)
    assert trainer.updates_completed == 2, "eight of four processes"
    assert shares == [2.0] * 4, "the loss times four processes, over groups of two batches"


@pytest.mark.parametrize("is_main", [True, False])
def test_process_index_that_is_no_int_is_told_by_the_main_process(is_main: bool) -> None:
    names = {"num_processes": 1, "is_main_process": is_main, "is_local_main_process": is_main, "device": "cpu"}
    assert Strategy(MagicMock(**names, scaler=None)).process_index == int(not is_main)


def test_param_groups_that_are_no_list_are_passed_over() -> None:
    class Still(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.tensor(1.0), "batch_size": 1, "model_outputs": None}

        def backward_step(self, loss: Any) -> None: ...

    trainer = train(Still(MagicMock(), Mock(), Mock(), ()), 1, rows(40))
    assert trainer.optimizer.step.call_count == 4
