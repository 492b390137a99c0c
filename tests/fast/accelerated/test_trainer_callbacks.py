"""The acceptance cases of events and callbacks, by number: one process, with and without accelerate."""

from __future__ import annotations

import copy
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import (  # noqa: E402
    CallbackHandler,
    CallbackMethodNotImplementedError,
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
    get_default_callbacks,
)
from det_core.accelerated.finetuning import ModelFreezer  # noqa: E402
from det_core.accelerated.utils import LIMIT_BATCHES_ENV_VAR, LimitBatches  # noqa: E402
from support.trainings import Events, a_trainer, evaluate, linear, rows, same, scripted, train, weights  # noqa: E402

"""For what concerns the model, its gradients or its place: with accelerate and without it."""


class Typo(TrainerCallback):
    """Reads what it does not have."""

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        self.missing_thing += 1  # type: ignore[attr-defined]


class StopsIn(Events):
    """Stops the training in an event of an epoch."""

    def __init__(self, event: str, epoch: int) -> None:
        super().__init__()
        self.event, self.epoch = event, epoch

        def stop(trainer: Any, **kwargs: Any) -> None:
            getattr(Events, event)(self, trainer, **kwargs)
            if trainer.run_history.current_epoch == epoch:
                raise StopTrainingError("that is enough")

        setattr(self, event, stop)


class After(Events):
    """Comes after others in the list."""


def nan_in(epoch: int, kind: str = "train", value: float = math.nan) -> type[Trainer]:
    """Return a Trainer whose loss is NaN in an epoch."""

    def calculate(self: Any, batch: Any) -> Any:
        output = getattr(Trainer, f"calculate_{kind}_batch_loss")(self, batch)
        if self.run_history.current_epoch == epoch:
            output["loss"] = output["loss"] + value
        return output

    return type("Nan", (Trainer,), {f"calculate_{kind}_batch_loss": calculate})


def test_case_25_a_typo_in_a_callback_is_an_error_that_says_where() -> None:
    callback = Typo()
    with pytest.raises(AttributeError, match="missing_thing") as caught:
        train(a_trainer(callbacks=[callback]))
    if hasattr(caught.value, "__notes__"):
        assert any("Typo" in note and "on_train_step_end" in note for note in caught.value.__notes__)
    assert not hasattr(callback, "x")
    assert type(pickle.loads(pickle.dumps(callback))) is type(copy.deepcopy(callback)) is Typo
    assert issubclass(CallbackMethodNotImplementedError, AttributeError)


def test_case_25_every_callback_is_copied_and_pickled(tmp_path: Path) -> None:
    for callback in [kind() for kind in get_default_callbacks()] + [
        SaveBestModelCallback(tmp_path / "best.pt"), EarlyStoppingCallback(), LimitBatchesCallback(2),
        LimitEvalStepsCallback(1), StepBasedEvaluationCallback(2), ModelEmaCallback(),
    ]:  # fmt: skip
        assert type(pickle.loads(pickle.dumps(callback))) is type(copy.deepcopy(callback)) is type(callback)


def test_case_26_two_of_one_class() -> None:
    with pytest.raises(ValueError, match=r"Events.*Events, After|Events"):
        CallbackHandler([Events, After, Events()])
    handler = a_trainer(callbacks=[Events, After]).callback_handler  # a subclass is another class
    assert handler.callback_list == ["Events", "After"] == [type(one).__name__ for one in handler]


def test_case_26_an_invented_event_reaches_those_who_have_it() -> None:
    received: list[tuple[Any, Any]] = []

    class Hears(TrainerCallback):
        def on_tuesday(self, trainer: Any, **kwargs: Any) -> None:
            received.append((trainer, kwargs))

    trainer = a_trainer(callbacks=[Events, Hears])
    trainer.callback_handler.call_event("on_tuesday", trainer, rain=True)
    trainer.callback_handler.call_event("on_wednesday", trainer)
    assert received == [(trainer, {"rain": True})]


def test_case_26_callbacks_come_in_order_and_may_be_added_later() -> None:
    order: list[str] = []

    class First(TrainerCallback):
        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            order.append(type(self).__name__)

    class Second(First):
        pass

    trainer = a_trainer(callbacks=[First])
    trainer.callback_handler.add_callback(Second)
    train(trainer)
    trainer.callback_handler.clear_callbacks()
    train(trainer)
    assert order == ["First", "Second"]


def test_case_27_a_stop_in_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    stopping, after = StopsIn("on_train_step_end", 2), After()
    trainer = train(a_trainer(callbacks=[stopping, after]), 3, eval_dataset=rows(10))
    assert "that is enough\n" in capsys.readouterr().out
    assert stopping.log[-3:] == ["on_train_step_end", "on_stop_training_error", "on_training_run_end"]
    # the later callback was not called in the event that raised
    assert after.log[-3:] == ["on_train_step_start", "on_stop_training_error", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 2
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1


def test_case_27_a_stop_leaves_no_gradients_to_the_next_run() -> None:
    class InTheMiddle(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
            if step == 1:
                raise StopTrainingError("half an update is computed")

    trainer = train(a_trainer(callbacks=[InTheMiddle]), gradient_accumulation_steps=2)
    assert trainer.updates_completed == 0
    trainer.callback_handler.clear_callbacks()
    train(trainer, gradient_accumulation_steps=2)
    assert same(trainer, train(a_trainer(), gradient_accumulation_steps=2))


@pytest.mark.parametrize("event", ["on_train_epoch_start", "on_eval_step_end", "on_training_run_epoch_end"])
def test_case_27_a_stop_elsewhere(event: str) -> None:
    stopping = StopsIn(event, 1)
    trainer = train(a_trainer(callbacks=[stopping]), 3, eval_dataset=rows(10))
    assert stopping.log[-3:] == [event, "on_stop_training_error", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 1


def test_case_27_a_stop_in_an_evaluation_run() -> None:
    stopping = StopsIn("on_eval_step_end", 1)
    evaluate(a_trainer(callbacks=[stopping]))
    assert stopping.log[-3:] == ["on_eval_step_end", "on_stop_training_error", "on_evaluation_run_end"]


def test_case_27_any_other_error_leaves_at_once_with_the_model_unwrapped() -> None:
    class Breaks(TrainerCallback):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

    events = After()
    trainer = a_trainer(callbacks=[events, Breaks])
    model, optimizer = trainer.model, trainer.optimizer
    with pytest.raises(OSError, match="disk full"):
        train(trainer)
    assert events.log[-1] == "on_train_step_end"
    assert trainer.model is model and trainer.optimizer is optimizer


def test_case_28_nan_ends_the_process_after_all_callbacks() -> None:
    after = After()
    trainer = a_trainer(nan_in(2), [TerminateOnNaNCallback, after])
    with pytest.raises(SystemExit) as caught:
        train(trainer, 3)
    assert caught.value.code == "Exiting due to NaN loss"
    assert after.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    callback = next(iter(trainer.callback_handler))
    assert callback.triggered
    trainer.calculate_train_batch_loss = Trainer.calculate_train_batch_loss.__get__(trainer)  # type: ignore[method-assign]
    train(trainer, 3)
    assert not callback.triggered and trainer.run_history.current_epoch == 4


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_case_28_nan_or_infinity_in_training_or_evaluation(
    kind: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = a_trainer(nan_in(1, kind, value), [TerminateOnNaNCallback], on_nan="stop")
    train(trainer, 2, eval_dataset=rows(10))
    word = {"train": "training", "eval": "validation"}[kind]
    assert f"Stopping training due to NaN loss in {word} step\n" in capsys.readouterr().out
    assert trainer.run_history.current_epoch == 1


def test_case_28_what_becomes_of_the_process() -> None:
    with pytest.raises(StopTrainingError, match="NaN loss in training step"):
        train(a_trainer(nan_in(1), [TerminateOnNaNCallback], on_nan="raise"))
    train(a_trainer(nan_in(1), [TerminateOnNaNCallback], on_nan="stop"))
    train(a_trainer(nan_in(1)))  # nobody looks
    with pytest.raises(ValueError, match=r"on_nan='ignore'.*exit"):
        a_trainer(on_nan="ignore")


def test_case_30_early_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    callback = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)
    trainer = train(a_trainer(scripted(1, 0.995, 0.99, 0.5), [callback]), 4, eval_dataset=rows(10))
    assert trainer.run_history.current_epoch == 3
    out = capsys.readouterr().out
    assert "Early stopping counter: 1/2\n" in out and "Early stopping counter: 2/2\n" in out
    assert "Stopping training due to no improvement after 2 epochs\n" in out
    assert callback.best_metric == 1 and callback.best_metric_epoch == 1


def test_case_30_what_counts_as_better() -> None:
    callback = EarlyStoppingCallback(1, 0.0, watch_metric="eval_accuracy", greater_is_better=True)

    class Accurate(Trainer):
        def eval_epoch_end(self) -> None:
            self.run_history.update_metric("eval_accuracy", (0.1, 0.2, 0.3, 0.3)[self.run_history.current_epoch - 1])

    trainer = train(a_trainer(Accurate, [callback]), 9, eval_dataset=rows(10))
    assert trainer.run_history.current_epoch == 4 and callback.best_metric == 0.3


class KeepsWeights(TrainerCallback):
    """Remembers the weights of each epoch's end."""

    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.epochs.append(weights(trainer))


def test_case_31_the_best_model_is_kept_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, keeps = tmp_path / "best.pt", KeepsWeights()
    best = SaveBestModelCallback(path)
    trainer = train(a_trainer(scripted(3, 1, 2), [keeps, best]), 3, eval_dataset=rows(10))
    content = torch.load(path, weights_only=True)
    assert (content["eval_loss_epoch"], content["loss"], content["epoch"]) == (1.0, 1.0, 2)
    assert all(torch.equal(a, b) for a, b in zip(keeps.epochs[1], content["model_state_dict"].values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(keeps.epochs[1], weights(trainer), strict=True))
    assert "Loading checkpoint with eval_loss_epoch: 1.0 from epoch 2\n" in capsys.readouterr().out
    assert (best.best_metric, best.best_metric_epoch) == (1.0, 2)


def test_case_31_a_stale_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    train(a_trainer(scripted(3), [SaveBestModelCallback(path)]), 1, eval_dataset=rows(10))
    stale = path.read_bytes()
    stopped = StopsIn("on_training_run_epoch_end", 1)
    trainer = a_trainer(scripted(3), [stopped, SaveBestModelCallback(path)], lr=0.01)
    train(trainer, 1, rows(10), eval_dataset=rows(10))
    assert path.read_bytes() == stale
    assert not any(torch.equal(a, b) for a, b in zip(
        weights(trainer), torch.load(path, weights_only=True)["model_state_dict"].values(), strict=True
    ))  # fmt: skip


def test_case_31_nan_is_the_worst_and_the_first_file_is_as_the_later_ones(tmp_path: Path) -> None:
    best = SaveBestModelCallback(tmp_path / "best.pt", save_scheduler=False, save_optimizer=False)
    trainer = a_trainer(scripted(math.nan, 2, math.nan), [best])
    make = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
    train(trainer, 1, eval_dataset=rows(10), create_scheduler_fn=make)
    first = torch.load(tmp_path / "best.pt", weights_only=True)
    train(trainer, 3, eval_dataset=rows(10), create_scheduler_fn=make)
    assert best.best_metric == 2 and best.best_metric_epoch == 2
    later = torch.load(tmp_path / "best.pt", weights_only=True)
    assert set(first) == set(later) == {"model_state_dict", "eval_loss_epoch", "loss", "epoch"}


def test_case_31_a_metric_that_nobody_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'eval_f1', which is not among the recorded metrics: train_loss_epoch"):
        train(a_trainer(callbacks=[SaveBestModelCallback(tmp_path / "best.pt", "eval_f1")]))


def test_case_32_the_average_of_a_model(tmp_path: Path) -> None:
    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    trainer = a_trainer(callbacks=[ema])
    model, old = trainer.model, weights(trainer)
    train(trainer, 1, eval_dataset=rows(10))
    expected = [0.5 * a + 0.5 * b for a, b in zip(old, weights(trainer), strict=True)]
    assert all(torch.allclose(a, b) for a, b in zip(expected, weights(ema.ema_model.module), strict=True))
    assert trainer.model is model and not ema.ema_model.module.training
    history = trainer.run_history
    assert history.get_latest_metric("ema_model_eval_loss_epoch") != history.get_latest_metric("eval_loss_epoch")
    x, y = rows(10).tensors
    loss = nn.functional.mse_loss(ema.ema_model.module(x), y).item()
    assert history.get_latest_metric("ema_model_eval_loss_epoch") == pytest.approx(loss)
    saved = torch.load(tmp_path / "ema.pt", weights_only=True)
    assert "optimizer_state_dict" not in saved
    assert all(torch.equal(a, b) for a, b in zip(weights(ema.ema_model.module), saved["model_state_dict"].values(),
                                                 strict=True))  # fmt: skip


def test_case_32_the_model_is_back_when_its_evaluation_raises(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_eval_step_end(self, trainer: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", callbacks=[Breaks])
    trainer = a_trainer(callbacks=[ema])
    model, handler = trainer.model, trainer.callback_handler
    with pytest.raises(OSError, match="disk full"):
        train(trainer, 1, eval_dataset=rows(10))
    assert trainer.model is model and trainer.callback_handler is handler
    assert trainer.run_history.metric_name_prefix == ""


def test_case_32_after_each_update_and_without_evaluation(tmp_path: Path) -> None:
    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", update_every="step")
    seen: list[Any] = []

    class Seen(Events):
        def on_update(self, trainer: Any, **kwargs: Any) -> None:
            seen.append(weights(trainer))

    trainer = a_trainer(callbacks=[ema, Seen])
    average = weights(trainer)
    train(trainer, gradient_accumulation_steps=2)
    assert len(seen) == 2
    for new in seen:
        average = [0.5 * a + 0.5 * b for a, b in zip(average, new, strict=True)]
    assert all(torch.allclose(a, b) for a, b in zip(average, weights(ema.ema_model.module), strict=True))
    assert (tmp_path / "ema.pt").exists()


def test_case_33_evaluation_in_the_middle_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    modes: list[bool] = []
    order: list[str] = []

    class Looking(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            modes.extend(module.training for module in self.model)
            return super().calculate_train_batch_loss(batch)

        def optimizer_step(self) -> None:
            order.append("update")
            super().optimizer_step()

    class Heard(Events):
        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            super().on_eval_epoch_end(trainer, **kwargs)  # type: ignore[misc]
            names = trainer.run_history.get_metric_names()
            order.append("evaluated" if "intermediate_eval_loss" in names else "epoch evaluated")

    frozen = nn.Dropout().eval()  # stays in evaluation mode by the user's own wish
    frozen.train = lambda mode=True: frozen  # type: ignore[method-assign]
    model = nn.Sequential(linear(), nn.Dropout(), frozen)
    trainer = a_trainer(Looking, [Heard, StepBasedEvaluationCallback(1)], model=model)
    train(trainer, 1, eval_dataset=rows(10))
    assert modes == [True, True, False] * 4
    assert order == ["update", *["update", "evaluated"] * 3, "epoch evaluated"]
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch", "eval_loss_epoch"]
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "step" in line] == [
        f"Running evaluation after {step} training steps" for step in (1, 2, 3)
    ]
    assert out.count("Resuming training...\n") == 3


def test_case_33_the_loss_of_the_epoch_is_that_of_training_alone() -> None:
    plain = train(a_trainer(lr=0.0), 1, eval_dataset=rows(20, 9.0))
    evaluated = train(a_trainer(callbacks=[StepBasedEvaluationCallback(1)], lr=0.0), 1, eval_dataset=rows(20, 9.0))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert plain.run_history.get_metric_values(name) == evaluated.run_history.get_metric_values(name)


def test_case_34_fewer_evaluation_steps(capsys: pytest.CaptureFixture[str]) -> None:
    events = Events()
    train(
        a_trainer(callbacks=[events, LimitEvalStepsCallback(1, limit_intermediate_only=False)]), 2, eval_dataset=rows()
    )
    assert events.count("on_eval_step_end") == 2
    assert capsys.readouterr().out.count("Limiting evaluation to 1 steps per process\n") == 2
    events = Events()
    limited = [events, LimitEvalStepsCallback(1), StepBasedEvaluationCallback(2)]
    trainer = train(a_trainer(callbacks=limited), 1, eval_dataset=rows())
    assert events.count("on_eval_step_end") == 1 + 4  # the one at step 2, then all of the epoch's
    assert len(trainer._eval_dataloader) == 4


def test_case_34_a_limit_that_a_stop_has_left_is_gone_in_the_next_run() -> None:
    limit, events = LimitEvalStepsCallback(1, limit_intermediate_only=False), Events()
    stopping = StopsIn("on_eval_step_end", 1)
    trainer = train(a_trainer(callbacks=[limit, stopping, events]), eval_dataset=rows(20, scale=9.0))
    trainer.callback_handler.callbacks.remove(stopping)
    limit.limit_intermediate_only = True
    train(trainer, 2, eval_dataset=rows(20))
    batches = [told["batch"][1] for name, told in events.told if name == "on_eval_step_end"]
    assert torch.equal(torch.cat(batches), torch.cat([rows(20).tensors[1]] * 2))


def test_case_34_fewer_batches() -> None:
    assert LIMIT_BATCHES_ENV_VAR not in os.environ
    events = Events()
    with LimitBatches(2):
        trainer = a_trainer(callbacks=[*get_default_callbacks(progress_bar=False), events])
        assert trainer.callback_handler.callback_list[0] == "LimitBatchesCallback"
    assert LIMIT_BATCHES_ENV_VAR not in os.environ
    for number in (1, 2):
        train(trainer, 1, eval_dataset=rows())
        assert events.count("on_train_step_end") == events.count("on_eval_step_end") == 2 * number
        assert trainer.run_config.num_update_steps_per_epoch == 2


def test_case_34_every_trainer_made_inside_heeds_the_limit() -> None:
    model = linear()
    with LimitBatches(2):
        trainer = Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        other = a_trainer(callbacks=[Events])
    assert train(trainer).updates_completed == train(other).updates_completed == 2


def test_case_34_a_limit_beyond_the_loader_and_its_last_group() -> None:
    trainer = train(a_trainer(callbacks=[LimitBatchesCallback(9)]), 1, rows(30), gradient_accumulation_steps=2)
    assert trainer.updates_completed == 2 == trainer.run_config.num_update_steps_per_epoch
    trainer = train(a_trainer(callbacks=[LimitBatchesCallback(3)]), 1, rows(50), gradient_accumulation_steps=2)
    assert trainer.updates_completed == 2


def test_case_35_frozen_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    first, last = weights(model[0]), weights(model[2])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    trainer = a_trainer(model=model, optimizer=optimizer)
    train(trainer)
    assert same(_Holding(first), model[0]) and not same(_Holding(last), model[2])
    for group in freezer.unfreeze(0, 0, set_modules_as_training=False).values():
        trainer.optimizer.add_param_group(group)
    train(trainer)
    assert not same(_Holding(first), model[0])


class _Holding:
    """Weights as a model's."""

    def __init__(self, held: list[Any]) -> None:
        self._held = held

    def parameters(self) -> list[Any]:
        return self._held


def test_modules_beside_the_model_are_moved() -> None:
    moved: list[Any] = []

    class Loss(nn.MSELoss):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            moved.append(device)
            return super().to(device)

    trainer = a_trainer(callbacks=[MoveModulesToDeviceCallback], loss_func=Loss())
    evaluate(train(trainer))
    assert moved == [trainer.device] * 2
