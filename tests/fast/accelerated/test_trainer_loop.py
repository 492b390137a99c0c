"""The acceptance cases of the accelerated Trainer's loop, by number: one process, with and without accelerate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated import TrainerPlaceholderValues as P  # noqa: E402
from support.trainings import (  # noqa: E402
    METHODS,
    Events,
    Recording,
    a_trainer,
    evaluate,
    linear,
    rows,
    same,
    train,
    weights,
)

"""For what concerns the model, its gradients or its place: with accelerate and without it."""

BATCH = ["on_train_step_start", "calculate_train_batch_loss", "on_train_step_end", "backward_step"]
UPDATE = ["optimizer_step", "optimizer_zero_grad"]
EVALUATED = ["on_eval_step_start", "calculate_eval_batch_loss", "on_eval_step_end"]


def an_evaluation(batches: int) -> list[str]:
    return ["eval_epoch_start", "on_eval_epoch_start", *EVALUATED * batches, "eval_epoch_end", "on_eval_epoch_end"]


def an_epoch(batches: int, evaluated: int | None) -> list[str]:
    return [
        "train_epoch_start", "on_train_epoch_start", *[*BATCH, *UPDATE] * batches, "train_epoch_end",
        "on_train_epoch_end", *([] if evaluated is None else an_evaluation(evaluated)),
        "training_run_epoch_end", "on_training_run_epoch_end",
    ]  # fmt: skip


def recorded(**options: Any) -> Recording:
    trainer = a_trainer(Recording, [Events], **options)
    assert isinstance(trainer, Recording) and trainer.log.pop(0) == "on_init_end"
    return trainer


def test_case_01_the_order_of_a_training_run() -> None:
    trainer = recorded()
    train(trainer, 2, eval_dataset=rows(20))
    assert trainer.log == [
        "training_run_start", "on_training_run_start", *an_epoch(4, 2) * 2, "training_run_end", "on_training_run_end",
    ]  # fmt: skip
    names = list(trainer.run_history.get_metric_names())
    assert names == ["train_loss_epoch", "eval_loss_epoch"]
    assert [len(trainer.run_history.get_metric_values(name)) for name in names] == [2, 2]
    assert trainer.run_history.current_epoch == 3


def test_case_01_what_events_are_told() -> None:
    events = Events()
    train(a_trainer(callbacks=[events]), 1, eval_dataset=rows(20))
    steps = [told for name, told in events.told if name == "on_train_step_end"]
    assert [told["step"] for told in steps] == [0, 1, 2, 3]
    assert all(len(told["batch"]) == 2 and {"loss", "model_outputs", "batch_size"} <= set(told["batch_output"])
               for told in steps)  # fmt: skip
    assert ("on_eval_epoch_start", {"is_intermediate": False}) in events.told
    assert ("on_eval_epoch_end", {"is_intermediate": False}) in events.told
    assert [set(told) for name, told in events.told if name == "on_eval_step_end"] == [{"batch", "batch_output"}] * 2


def test_case_01_modes_and_gradients() -> None:
    seen: list[tuple[bool, bool]] = []

    class Looking(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            seen.append((self.model.training, torch.is_grad_enabled()))
            return super().calculate_train_batch_loss(batch)

        calculate_eval_batch_loss = calculate_train_batch_loss

    train(a_trainer(Looking), 2, rows(10), eval_dataset=rows(10))
    assert seen == [(True, True), (False, False)] * 2


def test_case_02_the_order_of_an_evaluation_run() -> None:
    trainer = recorded()
    train(trainer)
    trainer.log.clear()
    before = weights(trainer)
    evaluate(trainer)
    assert trainer.log == [
        "evaluation_run_start", "on_evaluation_run_start", *an_evaluation(4), "evaluation_run_end",
        "on_evaluation_run_end",
    ]  # fmt: skip
    assert list(trainer.run_history.get_metric_names()) == ["evaluation_loss"]
    x, y = rows().tensors
    expected = nn.functional.mse_loss(linear_of(trainer)(x), y).item()
    assert trainer.run_history.get_latest_metric("evaluation_loss") == pytest.approx(expected)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def linear_of(trainer: Any) -> Any:
    """Its model, given back without wrappers."""
    assert type(trainer.model) is nn.Linear
    return trainer.model


def test_case_02_without_an_optimizer() -> None:
    trainer = Trainer(linear(), nn.functional.mse_loss, None, ())
    assert evaluate(trainer).run_history.get_latest_metric("evaluation_loss") > 0
    assert trainer.run_config.num_epochs == 1 and trainer.run_config.max_num_train_steps == 0


def test_case_03_no_evaluation_without_a_dataset() -> None:
    trainer = recorded()
    train(trainer, 2)
    assert trainer.log == [
        "training_run_start", "on_training_run_start", *an_epoch(4, None) * 2, "training_run_end",
        "on_training_run_end",
    ]  # fmt: skip
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch"]


def test_case_04_updates_of_accumulated_batches() -> None:
    trainer = recorded()
    schedulers: list[Any] = []

    def make(optimizer: Any) -> Any:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1000))
        return schedulers[0]

    train(trainer, 2, rows(100), gradient_accumulation_steps=3, create_scheduler_fn=make)
    count = trainer.log.count
    assert (count("optimizer_step"), count("scheduler_step"), count("optimizer_zero_grad")) == (8, 8, 8)
    assert schedulers[0].last_epoch == 8 and count("backward_step") == 20
    between = trainer.log[trainer.log.index("optimizer_step") :][:3]
    assert between == ["optimizer_step", "scheduler_step", "optimizer_zero_grad"]


def test_case_05_the_loss_does_not_depend_on_accumulation() -> None:
    losses = [
        train(a_trainer(lr=0.0), gradient_accumulation_steps=n).run_history.get_latest_metric("train_loss_epoch")
        for n in (1, 4)
    ]
    assert losses[0] == losses[1] > 0


def test_case_05_what_is_divided_is_a_new_tensor() -> None:
    """exp() keeps its result for backward, which an in-place division breaks."""
    handed: list[float] = []

    class Handed(Trainer):
        def backward_step(self, loss: Any) -> None:
            handed.append(loss.item())
            super().backward_step(loss)

    events = Events()
    trainer = a_trainer(Handed, [events], lr=0.0, loss_func=lambda out, y: (out - y).mean().exp())
    train(trainer, 1, rows(20), gradient_accumulation_steps=2)
    shown = [told["batch_output"]["loss"].item() for name, told in events.told if name == "on_train_step_end"]
    assert handed == pytest.approx([loss / 2 for loss in shown])


def test_case_06_a_short_last_group_is_divided_by_its_size() -> None:
    data, plain = rows(50), linear()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    x, y = data.tensors
    for group in ((0, 10), (20, 30), (40,)):
        for start in group:
            loss = nn.functional.mse_loss(plain(x[start : start + 10]), y[start : start + 10])
            (loss / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = a_trainer()
    train(trainer, 1, data, gradient_accumulation_steps=2, train_dataloader_kwargs={"shuffle": False})
    assert same(trainer, plain)


def test_case_07_gradients_are_clipped_once_an_update() -> None:
    largest: list[float] = []

    class Looking(Recording):
        def optimizer_step(self) -> None:
            largest.append(max(p.grad.abs().max().item() for p in self.model.parameters()))
            super().optimizer_step()

    trainer = a_trainer(Looking, loss_func=lambda out, y: 100 * nn.functional.mse_loss(out, y))
    train(trainer, gradient_accumulation_steps=2, gradient_clip_value=0.1)
    assert trainer.log.count("_clip_gradients") == 2  # type: ignore[attr-defined]
    assert largest == pytest.approx([0.1, 0.1])


def test_case_07_by_norm() -> None:
    norms: list[float] = []

    class Looking(Trainer):
        def optimizer_step(self) -> None:
            norms.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm().item())
            super().optimizer_step()

    trainer = a_trainer(Looking, loss_func=lambda out, y: 100 * nn.functional.mse_loss(out, y))
    train(trainer, gradient_accumulation_steps=2, gradient_clip_norm=0.5)
    assert norms == pytest.approx([0.5, 0.5], rel=1e-4)
    assert trainer.run_history.get_latest_metric("train_gradient_norm") > 1  # what it was before


def test_case_08_the_mean_over_samples() -> None:
    data = TensorDataset(
        torch.zeros(24, 2), torch.cat([torch.full((n, 1), v) for n, v in ((10, 1.0), (10, 2.0), (4, 6.0))])
    )
    trainer = a_trainer(lr=0.0, loss_func=lambda out, y: (0 * out + y).mean())
    train(trainer, 1, data, eval_dataset=data, train_dataloader_kwargs={"shuffle": False})
    expected = (10 * 1 + 10 * 2 + 4 * 6) / 24
    latest = trainer.run_history.get_latest_metric
    assert latest("train_loss_epoch") == latest("eval_loss_epoch") == expected
    assert type(latest("train_loss_epoch")) is float


def test_case_10_max_num_train_steps_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = recorded()
    train(trainer, 10, per_device_batch_size=1, max_num_train_steps=15, gradient_accumulation_steps=2,
          eval_dataset=rows(1))  # fmt: skip
    assert trainer.log.count("optimizer_step") == 15 and trainer.updates_completed == 15
    assert trainer.log[-10:] == [
        "eval_epoch_start", "on_eval_epoch_start", *EVALUATED, "eval_epoch_end", "on_eval_epoch_end",
        "training_run_epoch_end", "on_training_run_epoch_end", "training_run_end", "on_training_run_end",
    ][1:]  # fmt: skip
    assert "Reached max number of training steps 15 in epoch 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "updates", "epochs"), [(7, 7, 1), (None, 20, 2), (25, 25, 3)])
def test_case_11_the_limit_counts_and_not_the_epochs(limit: int | None, updates: int, epochs: int) -> None:
    trainer = train(recorded(), 2, rows(100), max_num_train_steps=limit)
    assert trainer.log.count("optimizer_step") == updates  # type: ignore[attr-defined]
    assert trainer.run_config.num_epochs == epochs
    assert trainer.run_config.max_num_train_steps == (limit or 21)


def test_case_13_two_runs_of_one_history() -> None:
    trainer = recorded()
    train(trainer, 2)
    train(trainer, 2, reset_run_history=False)
    assert trainer.log.count("optimizer_step") == 16
    assert trainer.run_history.current_epoch == 5
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    train(trainer, 1)
    assert trainer.run_history.current_epoch == 2
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1


def test_case_14_a_scheduler_does_not_outlive_its_run() -> None:
    trainer = a_trainer()
    train(trainer, create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.1 * 0.5**4)
    train(trainer)
    assert trainer.scheduler is None and trainer.optimizer.param_groups[0]["lr"] == rate


def test_case_14_nor_an_evaluation_dataset() -> None:
    trainer = a_trainer(callbacks=[events := Events()])
    train(trainer, eval_dataset=rows(10))
    events.log.clear()
    train(trainer)
    assert events.count("on_eval_epoch_start") == 0 and trainer._eval_dataloader is None


def test_case_15_placeholders_in_a_training_run() -> None:
    seen: dict[str, Any] = {}

    class Impostor:
        name = "NUM_EPOCHS"

    impostor = Impostor()

    def make(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, args=args)
        return torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    def given(first: Any, optimizer: Any, **kwargs: Any) -> Any:
        return make(optimizer, first, **kwargs)

    make_it = partial(
        given, P.NUM_EPOCHS, epochs=P.NUM_EPOCHS, everywhere=P.NUM_UPDATE_STEPS_PER_EPOCH,
        here=P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH, training=P.TRAIN_DATALOADER_LEN,
        evaluation=P.EVAL_DATALOADER_LEN, times=P.NUM_EPOCHS * 2, plus=P.NUM_EPOCHS + 2, left=2 * P.NUM_EPOCHS,
        both=P.NUM_EPOCHS * 2 + 1, minus=P.NUM_EPOCHS - 1, other=impostor,
    )  # fmt: skip
    train(a_trainer(), 3, rows(50), eval_dataset=rows(20), gradient_accumulation_steps=2, create_scheduler_fn=make_it)
    assert seen == {
        "args": (3,), "epochs": 3, "everywhere": 3, "here": 3, "training": 5, "evaluation": 2, "times": 6, "plus": 5,
        "left": 6, "both": 7, "minus": 2, "other": impostor,
    }  # fmt: skip
    assert all(type(value) is int for name, value in seen.items() if name not in ("args", "other"))


UNDERSCORED = (
    "_create_accelerator", "_create_callback_handler", "_prepare_model_optimizer_and_dataloaders",
    "_create_run_config", "_check_eval_batch_size", "_run_training", "_run_evaluation", "_run_train_epoch",
    "_run_eval_epoch", "_perform_forward_and_backward_passes", "_update_loss_tracker",
    "_add_epoch_loss_to_run_history", "_clip_gradients", "create_train_dataloader", "create_eval_dataloader",
    "create_scheduler", "get_default_train_dl_kwargs", "get_default_eval_dl_kwargs",
)  # fmt: skip


def test_case_45_every_overridable_method_is_called() -> None:
    counts: dict[str, int] = {}

    def counted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return getattr(super(cls, self), name)(*args, **kwargs)

        return method

    cls = type("Counting", (Trainer,), {})
    for name in {*METHODS, *UNDERSCORED}:
        setattr(cls, name, counted(name))
    trainer = a_trainer(cls)
    assert counts == {"_create_accelerator": 1, "_create_callback_handler": 1}
    train(
        trainer, 2, rows(50), eval_dataset=rows(20), gradient_accumulation_steps=2, gradient_clip_value=1.0,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000),
    )  # fmt: skip
    evaluate(trainer)
    assert counts == {
        "_create_accelerator": 3, "_create_callback_handler": 1, "_prepare_model_optimizer_and_dataloaders": 2,
        "create_train_dataloader": 1, "create_eval_dataloader": 2, "get_default_train_dl_kwargs": 1,
        "get_default_eval_dl_kwargs": 2, "_create_run_config": 2, "_check_eval_batch_size": 2, "create_scheduler": 1,
        "_run_training": 1, "training_run_start": 1, "training_run_end": 1, "training_run_epoch_end": 2,
        "_run_train_epoch": 2, "train_epoch_start": 2, "train_epoch_end": 2,
        "_perform_forward_and_backward_passes": 10, "calculate_train_batch_loss": 10, "backward_step": 10,
        "_clip_gradients": 6, "optimizer_step": 6, "scheduler_step": 6, "optimizer_zero_grad": 6,
        "_run_evaluation": 1, "evaluation_run_start": 1, "evaluation_run_end": 1, "_run_eval_epoch": 3,
        "eval_epoch_start": 3, "eval_epoch_end": 3, "calculate_eval_batch_loss": 8,
        "_update_loss_tracker": 18, "_add_epoch_loss_to_run_history": 5,
    }  # fmt: skip


def test_case_45_what_an_override_does_is_all_that_is_done() -> None:
    """A step of one's own that does not call super() replaces the Trainer's."""

    class Still(Trainer):
        def optimizer_step(self) -> None:
            pass

    trainer = a_trainer(Still)
    train(trainer)
    assert same(trainer, linear())
