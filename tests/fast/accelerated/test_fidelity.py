"""Subclasses and callbacks that worked with the original train here, as often; what cannot work is an error."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import det_core.accelerated.trainer as trainer_module  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import (  # noqa: E402
    CallbackHandler,
    LogMetricsCallback,
    ModelEmaCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
    WSDCheckpointCallback,
)
from det_core.accelerated.run_config import TrainerRunConfig  # noqa: E402
from det_core.accelerated.schedulers import WSDLrScheduler  # noqa: E402
from det_core.accelerated.tracking import InMemoryRunHistory, LossTracker  # noqa: E402
from det_core.accelerated.utils import ModelEma  # noqa: E402
from support.trainings import Events, a_trainer, evaluate, linear, rows, same, train, weights  # noqa: E402


class Moves:
    """Counts how often a model's weights have changed, by looking whenever it is called."""

    def __init__(self, model: Any) -> None:
        self.model, self.count, self.before = model, 0, weights(model)
        model.register_forward_pre_hook(self)

    def __call__(self, *args: Any) -> None:
        now = weights(self.model)
        self.count += not all(map(torch.equal, self.before, now))
        self.before = now


def moved(cls: type[Trainer] = Trainer, epochs: int = 2, data: Any = None, /, **options: Any) -> tuple[Any, int]:
    """Train 2 epochs of 4 batches; the trainer, and how often its weights changed."""
    model = options.pop("model", None) or linear()
    moves, trainer = Moves(model), a_trainer(cls, options.pop("callbacks", ()), model=model)
    trainer.optimizer = options.pop("optimizer", trainer.optimizer)
    train(trainer, epochs, data, **options)
    moves()
    return trainer, moves.count


def sgd(model: Any, lr: float = 0.1) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


# A2: what the optimizer is now


class Replaced(TrainerCallback):
    """Makes another optimizer in an event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.replace)

    def replace(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.optimizer is None:
            trainer.optimizer = sgd(trainer.model)
        elif trainer.run_history.current_epoch == 2:
            trainer.optimizer = sgd(trainer.model, 0.0)


@pytest.mark.parametrize(("event", "times"), [("on_training_run_start", 8), ("on_train_epoch_start", 4)])
def test_an_optimizer_that_is_made_in_an_event_is_stepped(event: str, times: int) -> None:
    trainer, count = moved(callbacks=[Replaced(event)], **({"optimizer": None} if times == 8 else {}))
    assert count == times and isinstance(trainer.optimizer, torch.optim.SGD)


class Passing(Trainer):
    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        pass


class Prepared(Trainer):
    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        self.model, self.optimizer = self._accelerator.prepare(self.model, self.optimizer)


class Swapped(Trainer):
    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        super()._prepare_model_optimizer_and_dataloaders()
        self.optimizer = sgd(self.model)


class LoaderToo(Trainer):
    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        self.model, self.optimizer, self._train_dataloader = self._accelerator.prepare(
            self.model, self.optimizer, self._train_dataloader
        )


class InStart(Trainer):
    def training_run_start(self) -> None:
        self.optimizer = sgd(self.model)


@pytest.mark.parametrize("cls", [Passing, Prepared, Swapped, LoaderToo, InStart])
def test_an_optimizer_however_it_was_prepared(cls: type[Trainer]) -> None:
    trainer, count = moved(cls)
    assert count == 8 and type(trainer.optimizer) is torch.optim.SGD and trainer.model.training
    assert train(trainer, 1).run_history.current_epoch == 2


def test_no_optimizer_at_the_first_update() -> None:
    trainer = Trainer(linear(), nn.functional.mse_loss, None, ())
    with pytest.raises(ValueError, match="training requires an optimizer: this Trainer has none at its first update"):
        train(trainer)


class Lookahead(torch.optim.Optimizer):
    """Has an optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.optimizer.step()


def test_an_optimizer_with_one_inside_stays_itself() -> None:
    model = linear()
    own = Lookahead(sgd(model))
    trainer, count = moved(model=model, optimizer=own)
    train(trainer, 1)
    assert trainer.optimizer is own and (own.steps, count) == (12, 8)


class Gan(Trainer):
    """Two optimizers in a dictionary, and a second one as an attribute."""

    def optimizer_step(self) -> None:
        for optimizer in self.optimizer.values():
            optimizer.step()

    def optimizer_zero_grad(self) -> None:
        for optimizer in self.optimizer.values():
            optimizer.zero_grad()


@pytest.mark.parametrize("cls", [Trainer, Gan])
def test_optimizers_in_a_dictionary(cls: type[Trainer]) -> None:
    model = linear()
    given = {name: torch.optim.SGD([p], lr=0.1, momentum=0.5) for name, p in model.named_parameters()}
    trainer, count = moved(cls, model=model, optimizer=given)
    assert count == 8 and trainer.optimizer == given and same(trainer, moved()[0])


# B1 to B4: the loop makes the update, reads the run config, and begins epochs at their beginning


class OwnPasses(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        output = self.calculate_train_batch_loss(batch)
        self._update_loss_tracker(output["loss"], output["batch_size"])
        self.backward_step(output["loss"])


class OwnEpoch(Trainer):
    def _run_train_epoch(self, train_dl: Any) -> Any:
        self.train_epoch_start()
        self._loss_tracker.reset()
        self.callback_handler.call_event("on_train_epoch_start", self)
        for step, batch in enumerate(train_dl):
            self._perform_forward_and_backward_passes(batch, step)
            self.optimizer_step()
            self.optimizer_zero_grad()
        self.train_epoch_end()
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        self.callback_handler.call_event("on_train_epoch_end", self)


class OwnRun(Trainer):
    def _run_training(self) -> None:
        self.training_run_start()
        self.callback_handler.call_event("on_training_run_start", self)
        for _ in range(self.run_config.num_epochs):
            self._run_train_epoch(self._train_dataloader)
            self.run_history._increment_epoch()
        self.training_run_end()
        self.callback_handler.call_event("on_training_run_end", self)


@pytest.mark.parametrize("cls", [OwnPasses, OwnEpoch, OwnRun])
def test_loops_of_ones_own_update_once_a_batch(cls: type[Trainer]) -> None:
    trainer, count = moved(cls)
    assert (
        count == trainer.updates_completed == 8 and len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2
    )
    assert cls is OwnEpoch or same(trainer, train(a_trainer(), 2))


class Fits(Trainer):
    """Trains by a method of its own, written as ``train()`` is."""

    def fit(self, dataset: Any, epochs: int, **config: Any) -> None:
        self.train_dataset = dataset
        self._train_dataloader = self.create_train_dataloader(batch_size=10, train_dl_kwargs={"num_workers": 0})
        self._prepare_model_optimizer_and_dataloaders()
        options: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_num_train_steps": None} | config
        self.run_config = self._create_run_config(10, epochs, gradient_clip_value=None, **options)
        self._run_training()


def test_a_method_like_train_trains() -> None:
    trainer = a_trainer(Fits)
    moves = Moves(trainer.model)
    for times in (8, 16):
        trainer.fit(rows(), 2)  # type: ignore[attr-defined]
        moves()
        assert trainer.updates_completed == 8 and moves.count == times
    assert type(trainer.optimizer) is torch.optim.SGD
    trainer.fit(rows(), 2, max_num_train_steps=3)  # type: ignore[attr-defined]
    assert trainer.updates_completed == 3


class Configured(Trainer):
    def _create_run_config(self, *args: Any, **kwargs: Any) -> TrainerRunConfig:
        config = super()._create_run_config(*args, **kwargs)
        return dataclasses.replace(config, gradient_accumulation_steps=2, max_num_train_steps=3)


def test_what_the_run_config_says_is_done() -> None:
    shares: list[float] = []

    class Looking(Configured):
        def backward_step(self, loss: Any) -> None:
            shares.append(loss.item() / self.batch_loss)
            super().backward_step(loss)

    trainer, count = moved(Looking)
    assert trainer.updates_completed == count == 3 and shares == pytest.approx([0.5] * 6)


def test_a_run_config_that_is_put_in_the_middle() -> None:
    class More(TrainerCallback):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_config = dataclasses.replace(trainer.run_config, num_epochs=3, max_num_train_steps=None)

    assert moved(callbacks=[More()])[1] == 12


# A4: loaders


def test_the_loader_is_as_accelerates() -> None:
    seen: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_eval_step_end(self, trainer: Any, batch: Any, **kwargs: Any) -> None:
            loader, state = trainer._eval_dataloader, trainer._accelerator.gradient_state
            seen.setdefault("last", []).append((state.end_of_dataloader, loader.end_of_dataloader))
            seen["gathered"] = seen.get("gathered", 0) + len(trainer._accelerator.gather_for_metrics(batch[0]))
            seen["loader"] = (
                loader,
                loader.device,
                loader.total_batch_size,
                loader.total_dataset_length,
                loader.remainder,
            )

    train(a_trainer(callbacks=[Looks()]), 1, eval_dataset=rows(17))
    assert seen["last"] == [(False, False), (True, True)] and seen["gathered"] == 17
    loader, *told = seen["loader"]
    assert told == [torch.device("cpu"), 10, 17, 7] and isinstance(loader, DataLoader)
    loader.set_epoch(1)
    assert len(list(loader)) == 2 and loader.dataset.tensors[0].shape == (17, 2)


# A5: names


class Named(Trainer):
    """Gives everyday names to things of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("optimizers", "schedulers", "steps_completed", "updates_completed", "is_main_process", "_run",
                     "is_local_main_process", "_seed", "_ranks", "_managed", "preempted", "batch_loss", "_step_end",
                     "_strategy", "_mixed_precision", "_resumed", "_profile", "_several"):  # fmt: skip
            setattr(self, name, f"my {name}")

    def after_update(self) -> None:  # type: ignore[override]
        raise AssertionError

    def _after_update(self) -> None:
        raise AssertionError

    def _prepared(self) -> None:
        raise AssertionError


def test_names_that_a_subclass_takes(tmp_path: Path) -> None:
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=3)
    more = [ProgressBarCallback, StepBasedEvaluationCallback(2), TerminateOnNaNCallback, states]
    trainer, count = moved(Named, callbacks=more, eval_dataset=rows(10))
    assert count == 8 and trainer._run == "my _run" and trainer.optimizers == "my optimizers"
    assert {"step_3", "step_6", "final"} == {path.name for path in tmp_path.iterdir()}
    assert vars(Trainer(linear(), None, None, ())).keys() <= {
        "model", "loss_func", "optimizer", "run_history", "callback_handler", "_callbacks", "_loss_tracker",
        "_accelerator", "_det_core",
    }  # fmt: skip


# A6, A7: callbacks


def test_super_with_what_the_originals_methods_use(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []

    def of(base: type, positional: bool = False, **given: Any) -> Any:
        class Sub(base):  # type: ignore[misc]
            def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kw: Any) -> None:
                if positional:
                    super().on_train_step_end(trainer, batch, batch_output)
                else:
                    super().on_train_step_end(trainer, batch_output=batch_output, **{**given, "step": kw["step"]})
                called.append(base.__name__)

            def on_eval_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kw: Any) -> None:
                super().on_eval_step_end(trainer, batch_output=batch_output)

        Sub.__name__ = f"Sub{base.__name__}"
        return Sub

    callbacks = [of(TrainerCallback, True)(), of(ProgressBarCallback)(), of(TerminateOnNaNCallback)(),
                 of(StepBasedEvaluationCallback)(3), of(SaveTrainingStateCallback)(save_at_end=False)]  # fmt: skip
    train(a_trainer(callbacks=callbacks), 1, eval_dataset=rows(10))
    assert len(called) == 5 * 4


def test_an_override_of_what_looks_for_nan() -> None:
    class Strict(TerminateOnNaNCallback):
        def check_for_nan_after_batch(self, batch_output: Any, step: Any = None) -> None:
            if step == "training" and batch_output["loss"] > 0:
                self.triggered = True
                raise StopTrainingError(f"too much in {step}")

    trainer, count = moved(callbacks=[Strict()])
    assert count == 0 and trainer.updates_completed == 0


def test_what_subclasses_of_callbacks_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[Any] = []

    class Logs(LogMetricsCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            self._log_latest_metrics(trainer, ["train_loss_epoch"])

        def log_metrics(self, trainer: Any, metrics: Any) -> None:
            logged.append(list(metrics))

    class Bars(ProgressBarCallback):
        def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
            super().on_train_step_end(trainer, batch=batch, batch_output=batch_output, **kwargs)
            self.pbar.set_postfix({"loss": 1.0}, lr=0.1)  # type: ignore[union-attr]
            self.pbar.set_description("mine")  # type: ignore[union-attr]
            self.pbar.update(1)  # type: ignore[union-attr]

    ema = ModelEmaCallback(save_path=tmp_path / "e.pt", decay=0.5)
    train(a_trainer(callbacks=[Logs(), Bars(), ema]), 1, eval_dataset=rows(10))
    assert logged == [["train_loss_epoch"], ["eval_loss_epoch"]]
    assert ema.model_ema_cls is ModelEma and isinstance(ema.callback_handler, CallbackHandler)
    average = ModelEma(linear())
    average._update(linear(), lambda ema, new: 0 * new)
    assert all(not p.any() for p in average.module.parameters())
    assert SaveBestModelCallback(greater_is_better=True).operator(2, 1) and SaveBestModelCallback().operator(1, 2)


class Bare:
    """A handler of the user's, which has one method."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        self.events.append(event)


def test_a_handler_of_ones_own_and_one_that_is_switched_off() -> None:
    handler = Bare()

    class Handled(Trainer):
        def _create_callback_handler(self) -> Any:
            return handler

    assert train(a_trainer(Handled), 1, eval_dataset=rows(10)).updates_completed == 4
    assert handler.events.count("on_train_step_end") == 4 and handler.events.count("on_eval_step_end") == 1
    trainer = a_trainer(callbacks=[events := Events()])
    trainer.callback_handler._enabled = False
    train(trainer)
    assert events.log == ["on_init_end"]


# B5 to B16: smaller ones


def test_numbers_of_any_kind() -> None:
    np = pytest.importorskip("numpy")
    trainer, count = moved(Trainer, np.int64(2), max_num_train_steps=3.0)
    assert count == 3 and type(trainer.run_config.max_num_train_steps) is int
    fields = {**trainer.run_config.to_dict(), "num_local_update_steps_per_epoch": 1000.0}
    assert TrainerRunConfig(**fields).num_local_update_steps_per_epoch == 1000


def test_the_history_as_people_read_it() -> None:
    history = InMemoryRunHistory()
    history._metrics["b"].append(1)
    history.update_metric("a", 2)
    names = history.get_metric_names()
    assert isinstance(names, set) and list(names) == ["b", "a"]
    assert names.union({"c"}) == {"a", "b", "c"} and names.difference({"a"}) == {"b"}
    assert history.get_metric_values("c") == [] and "c" not in history.get_metric_names()
    assert history._current_epoch == history.current_epoch == 1
    tracker = LossTracker()
    tracker.update(2.0, 3)
    assert tracker._average == tracker.average == 2.0


def test_a_factory_in_the_place_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "DataLoader", partial(DataLoader, drop_last=True))
    assert moved(Trainer, 1, rows(35))[1] == 3


def test_batch_sizes_where_no_loader_says_them() -> None:
    trainer = train(a_trainer(), 1)
    assert trainer.run_config.eval_per_device_batch_size == trainer.run_config.eval_total_batch_size == 10
    assert evaluate(trainer).run_config.train_per_device_batch_size == 10


def test_metadata_of_an_override_set_the_epoch(tmp_path: Path) -> None:
    class Loads(Trainer):
        def load_training_state(self, input_dir: Any) -> dict[str, Any]:
            return {"current_epoch": 3}

    trainer, count = moved(Loads, 4, resume_from=tmp_path)
    assert count == 8 and trainer.run_history.current_epoch == 5
    trainer.save_training_state(tmp_path / "state")
    assert a_trainer().load_training_state(tmp_path / "state") == {"current_epoch": 5}  # before any run


def test_what_a_wsd_checkpoint_says(tmp_path: Path) -> None:
    callback = WSDCheckpointCallback(tmp_path / "a")
    schedule = partial(WSDLrScheduler, total_steps=8, decay_phase_ratio=0.25)
    train(a_trainer(callbacks=[callback]), 2, create_scheduler_fn=schedule)
    told = torch.load(tmp_path / "a" / "checkpoint_8_wsd_post_decay.pt", weights_only=True)
    assert told["checkpoint_type"] == "wsd_post_decay" and told["timestamp"][4] == "-" and told["total_steps"] == 8
    assert callback.last_checkpoint_step == 8
    seen: list[Any] = []

    class Looks(WSDCheckpointCallback):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            super().on_training_run_start(trainer)
            seen.append(self.last_checkpoint_step)

    again = Looks(tmp_path / "b", initial_checkpoint=tmp_path / "a" / "checkpoint_6_wsd_pre_decay")
    train(a_trainer(callbacks=[again]), 2, create_scheduler_fn=schedule)
    assert seen == [6]


def test_a_timm_scheduler_that_takes_epochs_only() -> None:
    class Plain:
        def __init__(self, optimizer: Any) -> None:
            self.epochs: list[int] = []

        def step_update(self, num_updates: int) -> None: ...

        def step(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Quiet(trainer_module.TrainerWithTimmScheduler):
        def training_run_epoch_end(self) -> None:  # without super()
            pass

    trainer = train(a_trainer(Quiet), 2, create_scheduler_fn=Plain)
    assert trainer.scheduler.epochs == [1, 2]


def test_an_accelerator_that_accumulates() -> None:
    from accelerate import Accelerator

    class Accumulates(Trainer):
        def _create_accelerator(self) -> Any:
            return Accelerator(gradient_accumulation_steps=2)

        def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
            with self._accelerator.accumulate(self.model):
                super()._perform_forward_and_backward_passes(batch, step)

    assert moved(Accumulates)[1] == 4
