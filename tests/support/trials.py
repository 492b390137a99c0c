"""Tiny trials that record what happens to them, and one way to fit them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from det_core import client, pytorch
from det_core.journal import read_run
from det_core.pytorch import Batch, PyTorchTrial, PyTorchTrialContext


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    """Record i is (i, 2i)."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if i >= self.size:
            raise IndexError(i)
        return torch.tensor([float(i)]), torch.tensor([2.0 * i])


class Recording(pytorch.PyTorchCallback):
    """Recorder of every hook, with the facts that tell it from others."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events


def _recorded(hook: str) -> Callable[..., None]:
    def record(self: Recording, *args: Any, **kwargs: Any) -> None:
        self.events.append((hook, *args, *kwargs.values()))

    return record


for _hook in [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_") and name != "on_checkpoint_end"]:
    setattr(Recording, _hook, _recorded(_hook))


class Tiny(PyTorchTrial):
    """One weight, one optimizer; batches of two of the numbers, in order.

    Attributes:
        events: what happened: ``b3`` a batch, ``e1`` an evaluated one, and hooks where there are callbacks.
        seen: the records of each batch.
    """

    records, batch_size, validation_records = 8, 2, 2
    shuffle = False
    workers = 0

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.events: list[Any] = []
        self.seen: list[list[float]] = []
        torch.manual_seed(3)
        self.model = context.wrap_model(self.build())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.5))

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            Numbers(self.records), batch_size=self.batch_size, shuffle=self.shuffle, num_workers=self.workers
        )

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Numbers(self.validation_records), batch_size=self.batch_size)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.events.append(f"b{batch_idx}")
        self.seen.append(batch[0].flatten().tolist())
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return self.metrics(loss, batch_idx)

    def metrics(self, loss: torch.Tensor, batch_idx: int) -> Any:
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.events.append(f"e{batch_idx}")
        return {"val_loss": ((self.model(batch[0]) - batch[1]) ** 2).mean()}

    @property
    def weights(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.detach().flatten().tolist()]


class WithHooks(Tiny):
    """As Tiny, with a callback that records every hook among the events."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"recording": Recording(self.events)}


class Fitted:
    """Run and checkpoints that a fit has left."""

    def __init__(self, trial: Any, run_id: str) -> None:
        self.trial = trial
        self.run = client.run(run_id)

    def rows(self, group: str, name: str | None = None) -> Any:
        """Return steps, or pairs of step and the metric ``name``."""
        rows = read_run(self.run.path).rows(group)
        return [row.steps_completed if name is None else (row.steps_completed, row.metrics.get(name)) for row in rows]

    def batches(self) -> list[Any]:
        """Return the metrics of every trained batch, in order."""
        return [batch for row in read_run(self.run.path).rows("training", batches=True) for batch in row.batch_metrics]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints."""
        with client.checkpoints(run=self.run.run_id) as found:
            return sorted(checkpoint.steps_completed for checkpoint in found)

    def folder(self, steps: int | None = None) -> Path:
        """Return the directory of the checkpoint at ``steps``, or of the last one."""
        with client.checkpoints(run=self.run.run_id) as found:
            chosen = [c for c in found if steps in (None, c.steps_completed)]
        return self.run.path / "checkpoints" / max(chosen, key=lambda c: c.steps_completed).storage_id


@contextmanager
def built(cls: type[Any] = Tiny, **init: Any) -> Iterator[Any]:
    """Yield a trial with its context open."""
    options = {"hparams": {}, **init}
    with pytorch.init(**options) as context:
        yield cls(context)


def fit(cls: type[Any] = Tiny, length: Any = 4, *, init: dict[str, Any] | None = None, **options: Any) -> Fitted:
    """Build and fit a trial, bare.

    Args:
        cls: the trial.
        length: ``max_length``; a number means batches.
        init: arguments of ``pytorch.init()``.
        options: arguments of ``fit()``.
    """
    with built(cls, **(init or {})) as trial:
        unit = Batch(length) if isinstance(length, int) else length
        pytorch.Trainer(trial, trial.context).fit(max_length=unit, **options)
        run_id = trial.context._core.run_id
    return Fitted(trial, run_id)


def resumed(first: Any, then: Any, cls: type[Any] = Tiny, **options: Any) -> tuple[Fitted, Fitted]:
    """Fit, resume the run in another fit, and return both."""
    before = fit(cls, first, init={"name": "r"}, **options)
    return before, fit(cls, then, init={"name": "r", "resume": "latest"}, **options)
