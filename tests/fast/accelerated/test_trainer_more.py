"""Features of the Trainer beyond the original: metrics, several optimizers, norms, evaluation by updates; and
a managed training's reports."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from det_core import client, core  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import LogMetricsCallback  # noqa: E402
from det_core.accelerated.utils import world_process_zero_only  # noqa: E402
from det_core.journal import read_run  # noqa: E402
from support.trainings import Events, Recording, a_trainer, evaluate, linear, rows, same, train  # noqa: E402

# metrics


@pytest.fixture
def torchmetrics() -> Any:
    """Import torchmetrics on first use, as it imports scipy."""
    return pytest.importorskip("torchmetrics")


def test_metrics_of_each_epoch(torchmetrics: Any) -> None:
    trainer = a_trainer(
        lr=0.0, metrics=torchmetrics.MeanAbsoluteError(), train_metrics={"mae": torchmetrics.MeanAbsoluteError()}
    )
    train(trainer, 2, rows(24), eval_dataset=rows(14))
    latest = trainer.run_history.get_latest_metric
    for name, size in (("train_mae", 24), ("eval_meanabsoluteerror", 14)):
        x, y = rows(size).tensors
        assert latest(name) == pytest.approx((linear_of(trainer)(x) - y).abs().mean().item())
        assert len(trainer.run_history.get_metric_values(name)) == 2 and type(latest(name)) is float
    evaluate(trainer, rows(14))
    assert set(trainer.run_history.get_metric_names()) == {"evaluation_loss", "evaluation_meanabsoluteerror"}


def linear_of(trainer: Any) -> Any:
    """Its model, given back without wrappers."""
    assert type(trainer.model) is nn.Linear
    return trainer.model


def test_metrics_are_anew_in_each_epoch(torchmetrics: Any) -> None:
    trainer = a_trainer(metrics={"mae": torchmetrics.MeanAbsoluteError()})
    train(trainer, 3, eval_dataset=rows(14))
    x, y = rows(14).tensors
    assert trainer.run_history.get_latest_metric("eval_mae") == pytest.approx(
        (trainer.model(x) - y).abs().mean().item()
    )


def test_metrics_are_moved_to_the_device(torchmetrics: Any) -> None:
    moved: list[Any] = []

    class Moved(torchmetrics.MeanAbsoluteError):  # type: ignore[misc, name-defined]
        def to(self, *args: Any, **kwargs: Any) -> Any:
            moved.append(args[0])
            return super().to(*args, **kwargs)

    trainer = a_trainer(metrics={"a": Moved()}, train_metrics={"b": Moved()})
    evaluate(train(trainer), rows(14))
    assert moved == [trainer.device] * 4


def test_a_collection_and_ones_own_way_to_count(torchmetrics: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Signs(Trainer):
        def update_metrics(self, metrics: Any, batch: Any, batch_output: Any) -> None:
            metrics.update((batch_output["model_outputs"] > 0).int(), (batch[1] > 0).int())

    both = torchmetrics.MetricCollection(
        {"acc": torchmetrics.classification.BinaryAccuracy(), "f1": torchmetrics.classification.BinaryF1Score()}
    )
    trainer = a_trainer(Signs, [LogMetricsCallback], metrics=both)
    train(trainer, 1, eval_dataset=rows(20))
    names = ["train_loss_epoch", "eval_loss_epoch", "eval_acc", "eval_f1"]
    assert list(trainer.run_history.get_metric_names()) == names
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line]
    assert lines == names  # in the order of first recording


def test_metrics_that_a_subclass_keeps_under_that_name(torchmetrics: Any) -> None:
    class Counting(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.metrics = self.train_metrics = torchmetrics.MetricCollection({"mae": torchmetrics.MeanAbsoluteError()})
            self.counted: list[int] = []

        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_eval_batch_loss(batch)
            self.metrics.update(output["model_outputs"], batch[1])
            return output

        def eval_epoch_end(self) -> None:
            self.counted.append(self.metrics["mae"].update_count)
            self.metrics.reset()

    trainer = a_trainer(Counting)
    train(trainer, 2, eval_dataset=rows(20))
    assert trainer.counted == [2, 2]  # type: ignore[attr-defined]
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch", "eval_loss_epoch"]


# several optimizers


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))

    def optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def halving(optimizers: Any) -> Any:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]


def test_several_optimizers_and_schedulers(tmp_path: Path) -> None:
    plain = Halves()
    optimizers = plain.optimizers()
    schedulers = halving(optimizers)
    x, y = rows().tensors
    for start in range(0, 40, 10):
        nn.functional.mse_loss(plain(x[start : start + 10]), y[start : start + 10]).backward()
        for part in (*optimizers, *schedulers):
            part.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    model = Halves()
    given = model.optimizers()
    trainer = a_trainer(model=model, optimizer=given)
    train(trainer, create_scheduler_fn=halving, train_dataloader_kwargs={"shuffle": False})
    assert same(trainer, plain) and trainer.optimizer == given
    trainer.save_checkpoint(tmp_path / "c.pt")
    fresh = a_trainer(model=(other := Halves()), optimizer=other.optimizers())
    fresh.load_checkpoint(tmp_path / "c.pt", load_scheduler=False)
    assert same(fresh, trainer)
    assert [one.param_groups[0]["lr"] for one in fresh.optimizer] == [one.param_groups[0]["lr"] for one in given]


# norms, steps


def test_the_norm_of_gradients_in_the_history() -> None:
    norms: list[float] = []

    class Looking(Trainer):
        def optimizer_step(self) -> None:
            norms.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm().item())
            super().optimizer_step()

    trainer = train(a_trainer(Looking), 2, track_gradient_norm=True)
    values = trainer.run_history.get_metric_values("train_gradient_norm")
    assert values == pytest.approx([sum(norms[:4]) / 4, sum(norms[4:]) / 4])
    assert same(trainer, train(a_trainer(), 2))  # looking changes nothing


def test_training_and_evaluation_by_updates() -> None:
    events = Events()
    trainer = train(a_trainer(Recording, [events]), 1, max_num_train_steps=6, evaluate_every=2, eval_dataset=rows(10))
    starts = [told["is_intermediate"] for name, told in events.told if name == "on_eval_epoch_start"]
    # after update 2, the epoch with update 4, the one with update 6, the last of all
    assert starts == [True, False, False]
    assert trainer.updates_completed == 6
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch", "eval_loss_epoch"]
    assert same(trainer, train(a_trainer(), 1, max_num_train_steps=6))


# defects of the original


def test_a_later_epoch_number_ends_no_run() -> None:
    """The default bound of updates is of this run, whatever the history's epoch."""
    trainer = train(a_trainer(Recording), 3)
    for _ in range(2):
        trainer.log.clear()  # type: ignore[attr-defined]
        train(trainer, 2, reset_run_history=False)
        assert trainer.log.count("optimizer_step") == 8  # type: ignore[attr-defined]
    assert trainer.run_history.current_epoch == 8


def test_a_model_is_given_back_as_it_was_also_after_an_error() -> None:
    class Breaks(Events):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model = linear()
    trainer = a_trainer(callbacks=[Breaks], model=model, mixed_precision="bf16")
    optimizer = trainer.optimizer
    for run in (train, evaluate):
        if run is train:
            with pytest.raises(KeyboardInterrupt):
                run(trainer)
        else:
            run(trainer)
        assert trainer.model is model and "forward" not in vars(model) and trainer.optimizer is optimizer
        assert model(rows(10).tensors[0]).dtype is torch.float32


def test_two_trainings_in_workers_draw_alike() -> None:
    def run() -> Any:
        return train(a_trainer(), 1, Drawn(), train_dataloader_kwargs={"num_workers": 2})

    assert same(run(), run())


class Drawn(torch.utils.data.Dataset):  # type: ignore[misc]
    """Rows that workers draw, by all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        import random

        import numpy as np

        x = torch.rand(2) + random.random() + float(np.random.rand())
        return x, x.sum(0, keepdim=True)


# under the core


def test_case_40_reports_of_a_run_under_the_core() -> None:
    with core.init() as context:
        trainer = a_trainer(Recording, core_context=context)
        train(trainer, 2, eval_dataset=rows(20), gradient_accumulation_steps=2)
        evaluate(trainer, rows(20))
        run_id = context.run_id
    found = read_run(client.run(run_id).path)
    training, validation = found.rows("training"), found.rows("validation")
    assert [row.steps_completed for row in training] == [row.steps_completed for row in validation] == [2, 4]
    assert [set(row.metrics) for row in validation] == [{"eval_loss_epoch"}] * 2
    assert {"train_loss_epoch", "learning_rate", "epoch", "samples_per_second"} <= set(training[0].metrics)
    assert [row.metrics["epoch"] for row in training] == [1, 2]
    assert [row.steps_completed for row in found.rows("evaluation")] == [4]
    with client.checkpoints(run=run_id) as checkpoints:
        assert {one.steps_completed for one in checkpoints} <= {2, 4}


def test_case_40_the_open_context_is_found_and_changes_no_order() -> None:
    alone = train(a_trainer(Recording, [Events]), 2, eval_dataset=rows(20))
    with core.init() as context:
        managed = train(a_trainer(Recording, [Events]), 2, eval_dataset=rows(20), report_every=3)
        run_id = context.run_id
    assert managed.log == alone.log and same(managed, alone)  # type: ignore[attr-defined]
    steps = [row.steps_completed for row in read_run(client.run(run_id).path).rows("training")]
    assert sorted(set(steps)) == [3, 4, 6, 8]


# at the user's service


class Pair(NamedTuple):
    a: Any
    b: Any


def test_gather_and_print_with_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = a_trainer()
    tensor = torch.tensor([1.0, -100.0])
    assert trainer.gather(tensor) is tensor
    assert trainer.gather({"a": tensor}, padding_value=-100)["a"].tolist() == [1.0]
    pair = trainer.gather(Pair(tensor, [tensor]), padding_value=-100)
    assert type(pair) is Pair and pair.a.tolist() == pair.b[0].tolist() == [1.0]
    trainer.print("once", end="!\n")
    assert capsys.readouterr().out == "once!\n"
    assert world_process_zero_only(lambda: 5)() == 5 and trainer.device == torch.device("cpu")


def test_set_seed_and_the_launcher_for_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    from det_core.accelerated import notebook_launcher, set_seed
    from det_core.errors import MissingExtra

    set_seed(3)
    first = torch.rand(1)
    set_seed(3, device_specific=True)  # of rank 0
    assert torch.equal(first, torch.rand(1))
    set_seed(3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("RANK", "2")
    set_seed(1, device_specific=True)
    assert torch.equal(first, torch.rand(1))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match="starting processes from a notebook needs accelerate"):
        notebook_launcher(print)
    with pytest.raises(MissingExtra, match=r"the accelerated Trainer needs accelerate, .* Install it: pip install"):
        a_trainer()


# stand-ins of people's own tests


class Double:
    """Has the names of an accelerator that stand-ins in the wild have, and no more."""

    num_processes, distributed_type, mixed_precision, device = 1, "NO", "no", "cpu"
    is_main_process = is_local_main_process = True
    optimizer_step_was_skipped = False

    def __init__(self) -> None:
        self.printed: list[Any] = []

    def free_memory(self, *objects: Any) -> None: ...

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def no_sync(self, model: Any) -> Any:
        return nullcontext()

    def gather(self, tensor: Any) -> Any:
        return tensor

    def print(self, *args: Any) -> None:
        self.printed.append(args)


def test_a_double_of_an_accelerator() -> None:
    class Doubled(Trainer):
        def _create_accelerator(self) -> Any:
            return Double()

    plain = train(a_trainer(), 2, eval_dataset=rows(10))
    trainer = train(a_trainer(Doubled, [LogMetricsCallback]), 2, eval_dataset=rows(10))
    assert same(trainer, plain) and type(trainer._accelerator) is Double
    printed = [text for (text,) in trainer._accelerator.printed]
    assert [text.split(":")[0].strip() for text in printed] == ["train_loss_epoch", "eval_loss_epoch"] * 2


def test_what_a_trainer_is_given_is_not_looked_at_until_it_is_used() -> None:
    assert Trainer("model", "loss", "optimizer").model == "model"

    class Still(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.tensor(1.0), "batch_size": 1, "model_outputs": None}

        calculate_eval_batch_loss = calculate_train_batch_loss

        def backward_step(self, loss: Any) -> None: ...

    trainer = train(Still(MagicMock(), MagicMock(), MagicMock(), ()), 1, eval_dataset=rows(10))
    assert trainer.optimizer.step.call_count == trainer.optimizer.zero_grad.call_count == 4
