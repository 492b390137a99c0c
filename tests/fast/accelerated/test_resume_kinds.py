"""Trainings of other kinds that are stopped and resumed in one process: they end as one that was left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from det_core import core  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated._data import EpochLoader  # noqa: E402
from det_core.accelerated.callbacks import StopTrainingError, TrainerCallback  # noqa: E402
from support.trainings import Events, a_trainer, linear, rows, same, train, weights  # noqa: E402


class Leave(TrainerCallback):
    """Asks for a preemption after an update, counted in the trial."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_update(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.steps_completed == self.at:
            core.current_context().preempt._request_stop("signal")


def assert_resumed_as_straight(at: int, script: Callable[[TrainerCallback], Trainer]) -> None:
    """Compare weights and metrics of a script undisturbed, and stopped after an update and resumed."""
    with core.init():
        straight = script(Leave(0))
    with core.init(name="stopped"):
        assert script(Leave(at)).preempted
    with core.init(name="stopped", resume="latest"):
        resumed = script(Leave(0))
    assert same(resumed, straight)
    assert resumed.run_history._metrics == straight.run_history._metrics  # type: ignore[attr-defined]


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def a_noisy(callback: TrainerCallback, **options: Any) -> Trainer:
    torch.manual_seed(3)
    return a_trainer(
        callbacks=[callback], model=nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 1)), **options
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream(accumulation: int) -> None:
    """Its order is the same again, and so are the random numbers of what follows."""
    assert_resumed_as_straight(
        6 // accumulation,
        lambda callback: train(a_noisy(callback), 3, Stream(), gradient_accumulation_steps=accumulation),
    )


class DrawnStream(IterableDataset):  # type: ignore[misc]
    """A shuffled share of rows for each worker, to which it adds random numbers."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        x, y = rows().tensors
        indices = range(worker.id, len(x), worker.num_workers)
        return ((x[indices[i]] + torch.rand(2), y[indices[i]]) for i in torch.randperm(len(indices)).tolist())


@pytest.mark.parametrize("is_persistent", [False, True])
def test_stream_that_is_drawn_in_workers_resumes_as_straight(
    is_persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    workers = {"num_workers": 2, "persistent_workers": is_persistent}
    assert_resumed_as_straight(
        6, lambda callback: train(a_noisy(callback), 3, DrawnStream(), train_dataloader_kwargs=workers)
    )
    assert "not known to be that of before" not in caplog.text


def test_stream_that_is_drawn_in_workers_is_shared_by_two_ranks_and_resumes_on_each() -> None:
    def loader(rank: int, process_seed: int) -> EpochLoader:
        torch.manual_seed(process_seed)  # another one on each rank, and after a resume
        made = DataLoader(DrawnStream(), 10, num_workers=2)
        return EpochLoader(made, seed=5, rank=rank, size=2, even=True, device=torch.device("cpu"))

    labels = []
    for rank in range(2):
        straight = loader(rank, process_seed=rank)
        straight.begin(0)
        first_epoch = list(straight)
        straight.begin(1)
        second_epoch = list(straight)
        assert not torch.equal(first_epoch[0][1], second_epoch[0][1])
        resumed = loader(rank, process_seed=rank + 2)
        resumed.begin(1, first=1)
        [(x, y)] = resumed
        assert torch.equal(x, second_epoch[1][0]) and torch.equal(y, second_epoch[1][1])
        labels += [label for _, y in second_epoch for label in y.flatten().tolist()]
    assert sorted(labels) == sorted(rows().tensors[1].flatten().tolist())


@pytest.mark.parametrize("kind", ["generator=", "loader"])
def test_ones_own_generator_in_the_second_training(kind: str) -> None:
    def script(callback: TrainerCallback) -> Trainer:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(rows(), 10, shuffle=True)

        class Own(Trainer):
            def create_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
                return loader

        options = {"train_dataloader_kwargs": {"generator": generator}} if kind == "generator=" else {}
        trainer = a_trainer(Trainer if options else Own, [callback])
        for _ in range(2):
            train(trainer, 2, **options)
        assert generator.initial_seed() == 3
        return trainer

    assert_resumed_as_straight(10, script)


def test_training_metrics_in_collections() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def script(callback: TrainerCallback) -> Trainer:
        kinds = [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError(), torchmetrics.ExplainedVariance()]
        counted = {"these": torchmetrics.MetricCollection(kinds), "one": torchmetrics.MeanSquaredError()}
        return train(a_trainer(callbacks=[callback], train_metrics=counted), 2)

    assert_resumed_as_straight(6, script)


class Stop(TrainerCallback):
    """Stops the training for good in the step before an update, or at the end of an epoch."""

    def __init__(self, update: int = 0, epoch: int = 0) -> None:
        self.update, self.epoch = update, epoch

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        if trainer.updates_completed + 1 == self.update:
            raise StopTrainingError("enough")

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == self.epoch:
            raise StopTrainingError("enough")


@pytest.mark.parametrize(("stop", "every"), [(Stop(update=7), "epoch"), (Stop(epoch=2), 4)])
def test_what_was_stopped_for_good_stays_so(stop: Any, every: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its run ends when the script is started again; a later training of the script begins."""

    def script(*runs: Any) -> list[tuple[int, int]]:
        told = []
        with core.init(name="stopped", resume="latest"):
            for run in runs:
                train(a_trainer(callbacks=[run, events := Events()]), 3, checkpoint_every=every)
                told.append((events.count("on_train_step_end"), events.count("on_training_run_end")))
        return told

    assert script(stop)[0][1] == 1
    assert script(Leave(0)) == [(0, 1)]
    assert "where it was stopped for good" in capsys.readouterr().out
    assert script(Leave(0), Leave(0)) == [(0, 1), (12, 1)]


@pytest.mark.parametrize("kind", ["same", "other optimizer", "other model"])
def test_what_is_passed_over_has_the_model_of_the_checkpoint_if_it_fits(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(leave: int) -> Trainer:
        with core.init(name="between", resume="latest"):
            one = train(a_trainer(), 1)
            model = nn.Linear(2, 1, bias=False) if kind == "other model" else one.model
            optimizer = one.optimizer if kind == "same" else torch.optim.Adam(model.parameters(), lr=0.01)
            two = a_trainer(callbacks=[Leave(leave)], model=model, optimizer=optimizer, run_history=one.run_history)
            between.append((weights(one), one.steps_completed, one.updates_completed))
            momenta.append(len(one.optimizer.state))
            return train(two, 2)

    between: list[Any] = []
    momenta: list[int] = []
    left_with = weights(script(6))
    two = script(0)
    assert two.updates_completed == 8
    (_, *counts), (passed, *later) = between
    assert counts == [4, 4]
    if kind == "other model":
        assert later == [0, 0] and "the checkpoint has another" in capsys.readouterr().out
        assert all(torch.equal(a, b) for a, b in zip(passed, weights(linear()), strict=True))
    else:
        assert later == [6, 0] and "with the model of run 2" in capsys.readouterr().out
        assert all(torch.equal(a, b) for a, b in zip(passed, left_with, strict=True))
    assert momenta == [2, 0], "the later run restores its optimizer itself"
