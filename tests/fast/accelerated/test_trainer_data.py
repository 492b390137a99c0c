"""Loaders, schedulers, precision and mistakes: the acceptance cases by number, and errors before training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler  # noqa: E402

from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated import TrainerPlaceholderValues as P  # noqa: E402
from det_core.accelerated.callbacks import LimitBatchesCallback  # noqa: E402
from det_core.accelerated.trainer import TrainerWithTimmScheduler  # noqa: E402
from support.trainings import Events, Recording, a_trainer, evaluate, linear, rows, same, train  # noqa: E402


class Stream(IterableDataset):  # type: ignore[misc]
    """Rows one after the other; nobody knows how many."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(rows(self.size))


class Timm:
    """A scheduler with timm's methods that writes down how it is called."""

    def __init__(self, optimizer: Any) -> None:
        self.updates: list[int] = []
        self.epochs: list[tuple[int, Any]] = []

    def step_update(self, num_updates: int, metric: Any = None) -> None:
        self.updates.append(num_updates)

    def step(self, epoch: int, metric: Any = None) -> None:
        self.epochs.append((epoch, metric))


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1000)


@pytest.mark.parametrize("evaluated", [True, False])
def test_case_24_timm_counts_from_the_first_update(evaluated: bool) -> None:
    trainer = a_trainer(TrainerWithTimmScheduler, [Events()])
    train(trainer, 2, rows(20), eval_dataset=rows(10) if evaluated else None, create_scheduler_fn=Timm)
    assert trainer.scheduler.updates == [1, 2, 3, 4]
    losses = trainer.run_history.get_metric_values("eval_loss_epoch") if evaluated else [None, None]
    assert trainer.scheduler.epochs == list(zip((1, 2), losses, strict=True))


def test_case_24_accumulated_batches_are_one_update() -> None:
    trainer = a_trainer(TrainerWithTimmScheduler)
    train(trainer, 1, rows(50), gradient_accumulation_steps=2, create_scheduler_fn=Timm, eval_dataset=rows(10),
          evaluate_every=1)  # fmt: skip
    assert trainer.scheduler.updates == [1, 2, 3] and len(trainer.scheduler.epochs) == 1


# loaders


def test_case_42_an_iterable_dataset() -> None:
    events = Events()
    trainer = a_trainer(callbacks=[events])
    train(trainer, 2, Stream(50), eval_dataset=Stream(20), gradient_accumulation_steps=2)
    assert trainer.updates_completed == 6 and events.count("on_eval_step_end") == 4
    assert trainer.run_config.num_update_steps_per_epoch is None
    whole = train(a_trainer(), 2, rows(50), gradient_accumulation_steps=2, train_dataloader_kwargs={"shuffle": False})
    assert same(trainer, whole)  # its last group too is divided by its real size


def test_case_42_an_iterable_dataset_with_a_limit() -> None:
    seen: list[Any] = []
    make = partial(
        lambda optimizer, steps: [seen.append(steps), step_lr(optimizer)][1], steps=P.NUM_UPDATE_STEPS_PER_EPOCH
    )
    trainer = train(a_trainer(), 2, Stream(), max_num_train_steps=6, create_scheduler_fn=make)
    assert trainer.updates_completed == 6 and seen == [3]
    assert trainer.run_history.current_epoch == 3
    limited = train(a_trainer(callbacks=[LimitBatchesCallback(3)]), 2, Stream())
    assert limited.updates_completed == 6


def test_case_42_single_samples_and_batch_samplers() -> None:
    batched = [(x[:10], y[:10]) for x, y in [rows().tensors] * 4]
    single = train(a_trainer(), 1, batched, train_dataloader_kwargs={"batch_size": None, "shuffle": False})
    assert single.updates_completed == 4 and single.run_config.train_per_device_batch_size == 10
    sampler = BatchSampler(SequentialSampler(rows()), 8, drop_last=False)
    own = train(a_trainer(), 1, train_dataloader_kwargs={"batch_sampler": sampler})
    plain = train(a_trainer(), 1, train_dataloader_kwargs={"batch_size": 8, "shuffle": False})
    assert own.updates_completed == 5 and same(own, plain)
    assert own.run_config.train_per_device_batch_size == 8
    assert plain.run_config.train_per_device_batch_size == 8
    ordered = train(a_trainer(), 1, train_dataloader_kwargs={"sampler": RandomSampler(rows())})
    assert ordered.updates_completed == 4 and "shuffle" not in ordered._train_dl_kwargs  # type: ignore[operator]


def test_case_42_a_loader_of_ones_own() -> None:
    class Own(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return DataLoader(self.train_dataset, batch_size=20)

        def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
            return [rows(10).tensors, rows(10).tensors]  # any iterable

    events = Events()
    trainer = train(a_trainer(Own, [events]), 1, eval_dataset=rows())
    assert trainer.updates_completed == 2 and events.count("on_eval_step_end") == 2
    config = trainer.run_config
    assert (config.train_per_device_batch_size, config.train_total_batch_size, config.train_dl_kwargs) == (20, 20, None)
    assert config.eval_per_device_batch_size == config.eval_total_batch_size == 10  # as asked for


def test_the_default_arguments_of_loaders() -> None:
    trainer = a_trainer()
    expected = {"shuffle", "pin_memory", "batch_size", "num_workers", "worker_init_fn"}
    training, evaluation = trainer.get_default_train_dl_kwargs(4), trainer.get_default_eval_dl_kwargs(4)
    assert set(training) == set(evaluation) == expected
    assert training["shuffle"] is True and evaluation["shuffle"] is False and training["batch_size"] == 4
    collated: list[int] = []

    def collate(samples: Any) -> Any:
        collated.append(len(samples))
        return torch.utils.data.default_collate(samples)

    train(trainer, collate_fn=collate, eval_dataset=rows(20))
    assert collated == [10] * 6


def test_the_loader_class_is_looked_up_in_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Patched(DataLoader):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("det_core.accelerated.trainer.DataLoader", Patched)
    train(a_trainer(), eval_dataset=rows(10))
    assert {"dataset", "collate_fn", "batch_size"} <= set(made[0]) and made[1]["shuffle"] is False


# precision


def test_case_43_bf16() -> None:
    kinds: set[Any] = set()

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Any) -> Any:
            out = self.layer(x)
            kinds.add(out.dtype)
            return out

    def loss(out: Any, y: Any) -> Any:
        assert out.dtype is torch.float32
        return nn.functional.mse_loss(out, y)

    model = Looking()
    trainer = a_trainer(model=model, mixed_precision="bf16", loss_func=loss)
    train(trainer, 2, eval_dataset=rows(10))
    assert kinds == {torch.bfloat16} and trainer.run_config.mixed_precision == "bf16"
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[1] < losses[0]
    kinds.clear()
    assert trainer.model(rows(10).tensors[0]).dtype is torch.float32 and kinds == {
        torch.float32
    }  # given back as it was


def test_case_43_a_precision_is_of_one_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    first = a_trainer(mixed_precision="bf16")
    for other, precision in ((None, "no"), ("bf16", "bf16"), ("no", "no")):
        assert train(a_trainer(mixed_precision=other)).run_config.mixed_precision == precision
    assert train(first).run_config.mixed_precision == "bf16"


def test_case_43_the_precision_of_the_users_own_accelerator_stays() -> None:
    import accelerate

    own = accelerate.Accelerator(mixed_precision="bf16")
    for _ in range(2):
        assert train(a_trainer()).run_config.mixed_precision == own.mixed_precision == "bf16"


def test_case_43_precisions_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="fp7"):
        a_trainer(mixed_precision="fp7")
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="'fp16' needs a GPU: on this CPU the model computes in float32"):
            train(a_trainer(mixed_precision="fp16"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 needs a GPU")
def test_case_43_fp16_with_clipping_and_accumulation() -> None:
    trainer = a_trainer(mixed_precision="fp16")
    train(trainer, 3, gradient_accumulation_steps=2, gradient_clip_value=1.0)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[-1] < losses[0]


def test_case_43_a_skipped_step_does_not_step_the_scheduler() -> None:
    class Skipping(Recording):
        """Its optimizer skips the second update, as one does whose gradients have overflowed."""

        def optimizer_step(self) -> None:
            self._det_core.strategy.optimizer_step_was_skipped = self.updates_completed == 1
            if self.updates_completed != 1:
                super().optimizer_step()
                self._det_core.strategy.optimizer_step_was_skipped = False

    trainer = a_trainer(Skipping)
    train(trainer, create_scheduler_fn=step_lr)
    assert trainer.log.count("scheduler_step") == 3 and trainer.log.count("optimizer_zero_grad") == 4  # type: ignore[attr-defined]


# mistakes, each one error before training


def fails(trainer: Any, kind: type[Exception], match: str, *args: Any, **options: Any) -> None:
    """Fail a training before its first event."""
    with pytest.raises(kind, match=match):
        train(trainer, *args, **options)
    assert trainer.log == ["on_init_end"]


@pytest.mark.parametrize("make", [P.NUM_UPDATE_STEPS_PER_EPOCH, P.TRAIN_DATALOADER_LEN * 2])
def test_a_dataset_without_length_where_a_placeholder_needs_it(make: Any) -> None:
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=make)
    fails(a_trainer(Recording, [Events]), ValueError, "no length", 1, Stream(), create_scheduler_fn=scheduler)


def test_a_callback_that_is_no_callback() -> None:
    for wrong in (object(), "print", print, 3):
        with pytest.raises(TypeError, match="is not a callback"):
            a_trainer(callbacks=[wrong])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        ("a scheduler", "expected a function"),
        (7, "expected a function"),
        (lambda optimizer: None, r"returned None, which has no step\(\)"),
        (lambda optimizer, more: None, "more"),
        (lambda: None, "argument"),
    ],
)
def test_a_scheduler_function_of_the_wrong_shape(make: Any, match: str) -> None:
    if make == "a scheduler":  # made here: the first optimizer loads torch._dynamo, which takes seconds
        make = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(linear().parameters(), lr=1.0), 1)
    fails(a_trainer(Recording, [Events]), TypeError, match, create_scheduler_fn=make)


def test_a_loss_that_is_not_a_scalar() -> None:
    """Its mean is what an evaluation records; no gradient is of it."""
    trainer = a_trainer(Recording, loss_func=nn.MSELoss(reduction="none"))
    evaluate(trainer)
    x, y = rows().tensors
    mean = nn.functional.mse_loss(trainer.model(x), y).item()
    assert trainer.run_history.get_latest_metric("evaluation_loss") == pytest.approx(mean)
    with pytest.raises(RuntimeError, match="scalar"):
        train(trainer)
    assert "optimizer_step" not in trainer.log  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0"),
        ({"gradient_accumulation_steps": None}, TypeError, "gradient_accumulation_steps=None"),
        ({"max_num_train_steps": 1.5}, TypeError, "max_num_train_steps=1.5"),
        ({"gradient_clip_value": -1.0}, ValueError, "gradient_clip_value=-1.0"),
        ({"gradient_clip_value": "1"}, TypeError, "gradient_clip_value"),
        ({"gradient_clip_norm": 0}, ValueError, "gradient_clip_norm=0"),
        ({"evaluate_every": True}, TypeError, "evaluate_every=True"),
        ({"checkpoint_every": "batch"}, TypeError, "checkpoint_every='batch'"),
        ({"per_device_batch_size": "8"}, (TypeError, ValueError), "batch_size"),
    ],
)
def test_configuration_is_checked_by_type(options: dict[str, Any], kind: Any, match: str) -> None:
    fails(a_trainer(Recording, [Events]), kind, match, **options)


def test_number_of_epochs_is_checked() -> None:
    fails(a_trainer(Recording, [Events]), TypeError, "num_epochs='3'", "3")
    loader = torch.utils.data.DataLoader(rows())
    with pytest.raises(TypeError, match="a DataLoader was given as the dataset"):
        train(a_trainer(), 1, loader)
    fails(a_trainer(Recording, [Events]), ValueError, "num_epochs=-1", -1)


def test_training_without_an_optimizer() -> None:
    trainer = Trainer(linear(), nn.functional.mse_loss, None, ())
    with pytest.raises(ValueError, match="training requires an optimizer"):
        train(trainer)
