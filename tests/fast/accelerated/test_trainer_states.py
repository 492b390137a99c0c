"""The acceptance cases of checkpoints and training states, by number, and mistakes with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from det_core import core  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import (  # noqa: E402
    EarlyStoppingCallback,
    LimitBatchesCallback,
    ModelEmaCallback,
    SaveTrainingStateCallback,
)
from det_core.accelerated.schedulers import StatefulSchedulerBase  # noqa: E402
from det_core.errors import CheckpointError  # noqa: E402
from support.trainings import Events, Recording, a_trainer, rows, same, train, weights  # noqa: E402


def halving(optimizer: Any) -> Any:
    """Return a scheduler that halves the rate every two updates."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Decay(StatefulSchedulerBase):
    """Weight decay that grows with the updates; it has no state methods of its own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, param_group_field="weight_decay")

    def get_updated_values(self, num_updates: int) -> Any:
        return 0.001 * (num_updates + 1)


class Noisy(nn.Module):
    """Dropout, and a batch norm: what is drawn and counted as well as trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Augmented(torch.utils.data.Dataset):  # type: ignore[misc]
    """Rows with noise drawn as they are loaded, in a worker if there are any."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        x, y = rows()[i]
        return x + 0.1 * torch.randn(2), y


# one file


def test_case_36_a_checkpoint_in_a_fresh_trainer(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "checkpoint.pt"
    trainer = train(a_trainer(), 1, create_scheduler_fn=halving)
    trainer.save_checkpoint(path, {"note": "mine", "accuracy": 0.5})
    content = torch.load(path, weights_only=True)
    assert set(content) == {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "note", "accuracy"}
    assert set(content["model_state_dict"]) == {"weight", "bias"}

    fresh = a_trainer(Recording)
    seen: dict[str, Any] = {}

    class Loads(Events):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            seen.update(trainer.load_checkpoint(path), at=weights(trainer), scheduler=trainer.scheduler.state_dict())
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            seen["momentum"] = [state["momentum_buffer"].clone() for state in optimizer.state.values()]

    fresh.callback_handler.add_callback(Loads)
    train(fresh, 1, create_scheduler_fn=halving)
    assert seen["note"] == "mine" and seen["accuracy"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(seen["at"], weights(trainer), strict=True))
    saved = [state["momentum_buffer"] for state in content["optimizer_state_dict"]["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(seen["momentum"], saved, strict=True))
    assert seen["scheduler"]["last_epoch"] == 4


def test_case_36_within_a_run_without_wrappers(tmp_path: Path) -> None:
    class Saves(Events):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.save_checkpoint(tmp_path / "in.pt", save_optimizer=False, save_scheduler=False)

    train(a_trainer(callbacks=[Saves]), 1, create_scheduler_fn=halving)
    assert set(torch.load(tmp_path / "in.pt", weights_only=True)) == {"model_state_dict"}


def test_case_36_a_compiled_model(tmp_path: Path) -> None:
    trainer = a_trainer(model=torch.compile(nn.Linear(2, 1), backend="eager"))
    trainer.save_checkpoint(tmp_path / "c.pt")
    assert set(torch.load(tmp_path / "c.pt", weights_only=True)["model_state_dict"]) == {"weight", "bias"}
    assert type(trainer.get_model(keep_torch_compile=False)) is nn.Linear
    assert trainer.get_model() is trainer.model


def test_case_36_what_the_trainer_lacks(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    trainer = train(a_trainer(), 1, create_scheduler_fn=halving)
    trainer.save_checkpoint(path)
    bare = Trainer(nn.Linear(2, 1), nn.functional.mse_loss, None, ())
    with pytest.raises(ValueError, match=r"load_optimizer=False"):
        bare.load_checkpoint(path)
    with pytest.raises(ValueError, match=r"load_scheduler=False"):
        a_trainer().load_checkpoint(path)
    bare.load_checkpoint(path, load_optimizer=False, load_scheduler=False)
    assert same(bare, trainer)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        bare.load_checkpoint(tmp_path / "nowhere.pt")


def test_case_36_a_scheduler_whose_state_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stateless:
        def __init__(self, optimizer: Any) -> None:
            pass

        def step(self) -> None:
            pass

    trainer = train(a_trainer(), 1, create_scheduler_fn=Stateless)
    trainer.save_checkpoint(tmp_path / "c.pt")
    assert "scheduler_state_dict" not in torch.load(tmp_path / "c.pt", weights_only=True)
    assert "state_dict" in capsys.readouterr().out


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    other = a_trainer(model=nn.Linear(5, 1))
    other.save_checkpoint(tmp_path / "c.pt")
    train(other, 1, torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1)))
    other.save_training_state(tmp_path / "state")
    trainer = a_trainer(Recording)
    with pytest.raises(CheckpointError, match=r"c\.pt does not match the model"):
        trainer.load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="state does not match the model"):
        train(trainer, 1, resume_from=tmp_path / "state")
    assert "on_training_run_start" not in trainer.log and "training_run_start" not in trainer.log  # type: ignore[attr-defined]


def test_case_23_a_scheduler_of_weight_decay_without_state_methods(tmp_path: Path) -> None:
    trainer = train(a_trainer(), 1, create_scheduler_fn=Decay)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.004)
    trainer.save_checkpoint(tmp_path / "c.pt")
    fresh = a_trainer()

    class Loads(Events):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            trainer.load_checkpoint(tmp_path / "c.pt")

    fresh.callback_handler.add_callback(Loads)
    train(fresh, 1, create_scheduler_fn=Decay)
    assert fresh.optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.008)


def test_a_checkpoint_of_another_model_through_the_core() -> None:
    wide = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
    with core.init(name="mine"):
        train(a_trainer(model=nn.Linear(5, 1)), 1, wide)
    trainer = a_trainer(Recording, [Events])
    with (
        pytest.raises(CheckpointError, match="does not match the model"),
        core.init(name="mine", resume="latest"),
    ):
        train(trainer)
    assert trainer.log == ["on_init_end"]  # type: ignore[attr-defined]
    with (
        pytest.raises(CheckpointError, match="0 schedulers, and this training has 1"),
        core.init(name="mine", resume="latest"),
    ):
        train(a_trainer(model=nn.Linear(5, 1)), 1, wide, create_scheduler_fn=halving)


# training states


def an_augmented(callbacks: Any = ()) -> Any:
    return a_trainer(callbacks=callbacks, model=Noisy(), lr=0.05)


def test_case_37_a_state_of_each_epoch_and_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
    early = EarlyStoppingCallback(99)
    whole = train(an_augmented([early, states]), 3, eval_dataset=rows(20), create_scheduler_fn=halving)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1", "epoch_2", "epoch_3", "final"]
    for epoch in (1, 2, 3):
        trainer = train(an_augmented(), epoch, create_scheduler_fn=halving, resume_from=tmp_path / f"epoch_{epoch}")
        metadata = trainer.load_training_state(tmp_path / f"epoch_{epoch}")
        assert metadata == {"current_epoch": epoch, "global_step": 4 * epoch}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl",
            "trainer_metadata.pt"} <= {path.name for path in (tmp_path / "epoch_2").iterdir()}  # fmt: skip

    events = Events()
    resumed = an_augmented([EarlyStoppingCallback(99), events])
    train(resumed, 3, eval_dataset=rows(20), create_scheduler_fn=halving, resume_from=tmp_path / "epoch_2")
    assert events.count("on_train_step_end") == 4
    assert same(whole, resumed)
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert whole.run_history.get_metric_values(name) == resumed.run_history.get_metric_values(name)
    assert f"Resumed training state from {tmp_path / 'epoch_2'} (epoch 2)\n" in capsys.readouterr().out
    assert vars(next(iter(resumed.callback_handler))) == vars(early)  # its counter too
    assert resumed.run_history.current_epoch == 4


@pytest.mark.parametrize(("workers", "accumulation", "step"), [(0, 1, 6), (2, 1, 6), (0, 2, 5)])
def test_case_37_from_the_middle_of_an_epoch(tmp_path: Path, workers: int, accumulation: int, step: int) -> None:
    def run(callbacks: Any, **options: Any) -> Any:
        loader = {"num_workers": workers}
        return train(an_augmented(callbacks), 3, Augmented(), create_scheduler_fn=halving,
                     train_dataloader_kwargs=loader, gradient_accumulation_steps=accumulation, **options)  # fmt: skip

    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "e.pt", update_every="step")
    whole = run([ema, SaveTrainingStateCallback(tmp_path, save_every_n_steps=step, max_checkpoints=9)])
    events, other = Events(), ModelEmaCallback(decay=0.5, save_path=tmp_path / "e2.pt", update_every="step")
    resumed = run([other, events], resume_from=tmp_path / f"step_{step}")
    done = step + step % accumulation  # the state is that of after the group's update
    assert events.count("on_train_step_end") == 12 - done
    assert next(told["step"] for name, told in events.told if name == "on_train_step_end") == done % 4
    assert same(whole, resumed)
    assert same(ema.ema_model.module, other.ema_model.module)
    values = [one.run_history.get_metric_values("train_loss_epoch") for one in (whole, resumed)]
    assert values[0] == values[1] and len(values[0]) == 3


def test_case_37_from_the_middle_of_a_stream_that_is_cut(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter([rows()[i] for i in range(40)])

    limit = LimitBatchesCallback(3)
    whole = train(a_trainer(callbacks=[limit, SaveTrainingStateCallback(tmp_path, save_every_n_steps=2)]), 2, Stream())
    resumed = train(a_trainer(callbacks=[limit]), 2, Stream(), resume_from=tmp_path / "step_2")
    assert whole.updates_completed == resumed.updates_completed == 6 and same(whole, resumed)


def test_case_37_a_state_of_the_end_has_nothing_left(tmp_path: Path) -> None:
    whole = train(a_trainer(callbacks=[SaveTrainingStateCallback(tmp_path)]), 2)
    events = Events()
    resumed = train(a_trainer(callbacks=[events]), 2, resume_from=tmp_path / "final")
    assert events.count("on_train_step_end") == 0 and same(whole, resumed)
    train(further := a_trainer(callbacks=[events]), 3, resume_from=tmp_path / "final")
    assert events.count("on_train_step_end") == 4 and further.run_history.current_epoch == 4


def test_case_37_the_newest_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=2, save_at_end=False)
    train(a_trainer(callbacks=[states]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]
    assert states._saved_checkpoints == [str(tmp_path / "step_3"), str(tmp_path / "step_4")]
    assert capsys.readouterr().out.count("Saved training state to") == 4
    again = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=2, save_at_end=False)
    train(a_trainer(callbacks=[again]), 2, resume_from=tmp_path / "step_4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_7", "step_8"]  # the list went on


def test_case_37_a_folder_of_the_originals(tmp_path: Path) -> None:
    """It registered the scheduler again at each save, and kept neither history nor position."""
    train(
        a_trainer(callbacks=[SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)]),
        2,
        create_scheduler_fn=halving,
    )
    folder = tmp_path / "epoch_2"
    (folder / "trainer_state.pt").unlink()
    shutil.copyfile(folder / "custom_checkpoint_0.pkl", folder / "custom_checkpoint_1.pkl")
    seen: list[int] = []

    class Looks(Events):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            seen.append(trainer.scheduler.last_epoch)

    events = Looks()
    trainer = train(a_trainer(callbacks=[events]), 3, create_scheduler_fn=halving, resume_from=folder)
    assert seen == [8] and trainer.run_history.current_epoch == 4
    assert events.count("on_train_step_end") == 8  # its epoch again, as it does not say how much of it was done


def test_case_37_a_failed_save_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train(a_trainer())
    trainer.save_training_state(tmp_path / "s", {"n": 1})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            trainer.save_training_state(tmp_path / "s", {"n": 2})
    assert trainer.load_training_state(tmp_path / "s")["n"] == 1
    trainer.save_training_state(tmp_path / "s", {"n": 3})
    assert trainer.load_training_state(tmp_path / "s")["n"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        trainer.load_training_state(tmp_path / "nowhere")


def test_the_run_history_of_a_resume_is_not_forgotten(tmp_path: Path) -> None:
    trainer = train(a_trainer(callbacks=[SaveTrainingStateCallback(tmp_path)]), 2)
    train(trainer, 3, resume_from=tmp_path / "final")
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 3


def test_a_state_of_version_1_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """It had its position and ranks in files of their own."""
    whole = train(an_augmented([SaveTrainingStateCallback(tmp_path, save_every_n_steps=6)]), 3)
    folder = tmp_path / "step_6"
    state = torch.load(folder / "trainer_state.pt", weights_only=True)
    (ranks,), position = state.pop("ranks"), {**state.pop("position"), "version": 1, "size": 1}
    del position["reported"], state["given"]
    (folder / "trainer_state.json").write_text(json.dumps(position))
    torch.save(ranks, folder / "rng_rank0.pth")
    torch.save(state, folder / "trainer_state.pt")
    events = Events()
    assert same(whole, train(an_augmented([events]), 3, resume_from=folder))
    assert events.count("on_train_step_end") == 6
