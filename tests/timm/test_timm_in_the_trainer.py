"""Schedulers and optimizers of the real timm in the accelerated Trainer: as in timm's loop, and over checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from support.accelerated import assert_same
from support.timm_steps import timm_or_skip

torch = pytest.importorskip("torch")

from det_core import core  # noqa: E402
from det_core.accelerated.callbacks import TrainerCallback  # noqa: E402
from det_core.accelerated.trainer import TrainerWithTimmScheduler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # timm's and torchvision's own
EPOCHS, BATCHES = 3, 4
ROWS = [(torch.tensor([i / 40]), torch.tensor([i / 20])) for i in range(40)]
KINDS = {
    "cosine in updates": ("CosineLRScheduler", {"t_initial": EPOCHS * BATCHES, "t_in_epochs": False, "warmup_t": 3}),
    "cosine in epochs": ("CosineLRScheduler", {"t_initial": EPOCHS, "warmup_t": 1, "warmup_lr_init": 0.001}),
    "plateau": ("PlateauLRScheduler", {"patience_t": 0, "threshold": 10.0, "decay_rate": 0.5}),
}
OPTIMIZERS = ["sgd", "adamw", "lookahead_lion"]


@pytest.fixture(autouse=True)
def timm() -> Any:
    """Return timm itself."""
    timm_or_skip()
    return importlib.import_module("timm")


def parts(kind: str, opt: str) -> tuple[Any, Any, Any]:
    """Return a model, an optimizer of timm, and a function that makes a scheduler of it that notes its calls."""
    from timm import scheduler as schedulers
    from timm.optim import create_optimizer_v2

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    name, options = KINDS[kind]
    calls: list[Any] = []

    class Noting(getattr(schedulers, name)):  # type: ignore[misc]
        def step(self, epoch: int, metric: float | None = None) -> None:
            calls.append(("step", epoch, metric is not None))
            super().step(epoch, metric)

        def step_update(self, num_updates: int, metric: float | None = None) -> None:
            calls.append(("update", num_updates))
            super().step_update(num_updates, metric)

    def make(optimizer: Any) -> Any:
        made = Noting(optimizer, **options)
        make.calls = calls  # type: ignore[attr-defined]
        return made

    return model, create_optimizer_v2(model, opt=opt, lr=0.02), make


class Rates(TrainerCallback):
    """Notes the rate after each update; fails in the step before one of them."""

    def __init__(self, fails_at: int = 0) -> None:
        self.rates: list[float] = []
        self._fails_at = fails_at

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])
        if trainer.updates_completed + 1 == self._fails_at:
            raise KeyError("as a crash does")


def train(kind: str, opt: str, *callbacks: Any, eval_rows: Any = ROWS, epochs: int = EPOCHS, **more: Any) -> Any:
    model, optimizer, make = parts(kind, opt)
    trainer = TrainerWithTimmScheduler(model, torch.nn.functional.mse_loss, optimizer, callbacks)
    workers = {"num_workers": 0}
    trainer.train(
        ROWS, epochs, eval_dataset=eval_rows, per_device_batch_size=10, create_scheduler_fn=make,
        train_dataloader_kwargs={"shuffle": False, **workers}, eval_dataloader_kwargs=workers, **more,
    )  # fmt: skip
    return trainer, getattr(make, "calls", [])


def by_hand(kind: str, opt: str) -> tuple[Any, list[float]]:
    """Train by timm's own loop."""
    model, optimizer, make = parts(kind, opt)
    scheduler, updates, rates = make(optimizer), 0, []
    batches = [
        tuple(torch.stack(column) for column in zip(*ROWS[n : n + 10], strict=True)) for n in range(0, len(ROWS), 10)
    ]
    for epoch in range(EPOCHS):
        for inputs, targets in batches:
            rates.append(optimizer.param_groups[0]["lr"])
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            updates += 1
            scheduler.step_update(num_updates=updates)
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [torch.nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in batches]
        scheduler.step(epoch + 1, metric=sum(loss * 10 for loss in losses) / 40)
    return model, rates


@pytest.mark.parametrize("evaluates", [True, False])
def test_case_24_what_timm_is_told(evaluates: bool) -> None:
    _, calls = train("cosine in updates", "sgd", eval_rows=ROWS if evaluates else None, epochs=2)
    assert calls == [
        ("update", 1), ("update", 2), ("update", 3), ("update", 4), ("step", 1, evaluates),
        ("update", 5), ("update", 6), ("update", 7), ("update", 8), ("step", 2, evaluates),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_case_24_trains_as_timms_own_loop(kind: str) -> None:
    for opt in OPTIMIZERS:
        rates = Rates()
        trainer, _ = train(kind, opt, rates)
        model, wanted = by_hand(kind, opt)
        assert rates.rates == wanted and len(set(wanted)) > 1, opt
        assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()), opt)


@pytest.mark.parametrize("kind", KINDS)
def test_case_24_goes_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    for opt in OPTIMIZERS:
        straight = Rates()
        whole, _ = train(kind, opt, straight)
        with pytest.raises(KeyError), core.init(name=opt, resume="latest"):
            train(kind, opt, Rates(6), checkpoint_every=1)
        with core.init(name=opt, resume="latest"):
            rates = Rates()
            other, calls = train(kind, opt, rates, checkpoint_every=1)
        assert calls[0] == ("update", 6) and rates.rates == straight.rates[5:], opt
        assert_same(dict(other.model.state_dict()), dict(whole.model.state_dict()), opt)
        assert_same(other.optimizer.state_dict(), whole.optimizer.state_dict(), opt)

        other.save_checkpoint(tmp_path / "file.pt")
        model, optimizer, make = parts(kind, opt)
        fresh = TrainerWithTimmScheduler(model, torch.nn.functional.mse_loss, optimizer, ())
        fresh.scheduler = make(optimizer)
        fresh.load_checkpoint(tmp_path / "file.pt")
        assert_same(dict(fresh.model.state_dict()), dict(whole.model.state_dict()), opt)
        assert_same(fresh.optimizer.state_dict(), whole.optimizer.state_dict(), opt)
