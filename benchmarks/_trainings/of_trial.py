"""The five for Determined's PyTorchTrial. ``of_trial.py PACKAGE TRAINING``: only the package's name differs.

Nothing is shuffled, so that both see the same batches; what a step draws comes from a generator of the script's own.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from contextlib import contextmanager
from typing import Any

import tasks  # type: ignore[import-not-found]
import torch
from torch import nn
from torch.nn import functional as F

PACKAGE, TRAINING = sys.argv[1:3]
core = importlib.import_module(f"{PACKAGE}.core")
pytorch = importlib.import_module(f"{PACKAGE}.pytorch")
account = tasks.Account()
SEARCHER = {"searcher": {"name": "single", "metric": "error", "smaller_is_better": True, "max_length": {"epochs": 1}}}


@contextmanager
def opened() -> Any:
    """Yield the context of a trial; on several ranks with the process group of torchrun's variables."""
    distributed = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # ``finetuning`` opens a second context in the process, whose group is there by then.
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        distributed = core.DistributedContext.from_torch_distributed()
    with pytorch.init(hparams={}, exp_conf=SEARCHER, distributed=distributed) as context:
        yield context
    if distributed is not None:
        distributed.close()


class Noting(pytorch.PyTorchCallback):  # type: ignore[misc, name-defined]
    """Notes what is reported."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        own = {"batches", "epochs"}  # which Determined adds from 0.38 on; here they are in the report alone
        account.note({f"training {name}": value for name, value in avg_metrics.items() if name not in own})

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        account.note({f"validation {name}": value for name, value in metrics.items()})


class Trial(pytorch.PyTorchTrial):  # type: ignore[misc, name-defined]
    """Base of the five: the data and the record."""

    batch = 8
    data: tuple[Any, Any]

    def __init__(self, context: Any) -> None:
        self.context = context

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(self.data[0], batch_size=self.batch)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(self.data[1], batch_size=self.batch)

    def build_callbacks(self) -> dict[str, Any]:
        return {"noting": Noting()}


def fit(trial: Trial, epochs: int, **options: Any) -> None:
    """Train with a validation an epoch."""
    period = pytorch.Epoch(1)
    pytorch.Trainer(trial, trial.context).fit(max_length=pytorch.Epoch(epochs), validation_period=period, **options)


class Images(Trial):
    """Mixup, an average of the weights, a scheduler of timm's."""

    data = tasks.images(96, 1), tasks.images(64, 2)

    def __init__(self, context: Any) -> None:
        from timm.scheduler import CosineLRScheduler  # type: ignore[import-not-found]

        super().__init__(context)
        self.model = context.wrap_model(tasks.convolutions())
        self.ema = copy.deepcopy(self.model)
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        account.watch("adam", self.optimizer)
        self.scheduler = CosineLRScheduler(self.optimizer, 60, t_in_epochs=False, warmup_t=6, warmup_lr_init=0.001)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        pictures, kinds = tasks.mixed(*batch)
        loss = F.cross_entropy(self.model(pictures), kinds)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.scheduler.step_update(batch_idx + 1)
        with torch.no_grad():
            # Not the parameters alone: a validation also reads the running statistics of the batch norm.
            for kept, new in zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True):
                kept.copy_(0.9 * kept + 0.1 * new)
        return {"loss": loss, "lr": self.optimizer.param_groups[0]["lr"]}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.ema.eval()
        pictures, kinds = batch
        return {name: F.cross_entropy(model(pictures), kinds)
                for name, model in (("error", self.model), ("ema_error", self.ema))}  # fmt: skip


class Adversaries(Trial):
    """Two models, two optimizers."""

    data = tasks.points(64), tasks.points(32)

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.model = tasks.Gan()
        self.g = context.wrap_model(self.model.generator)
        self.d = context.wrap_model(self.model.discriminator)
        self.g_optimizer, self.d_optimizer = (
            context.wrap_optimizer(account.watch(name, torch.optim.Adam(part.parameters(), lr=0.02)))
            for name, part in (("generator", self.g), ("discriminator", self.d))
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (real,) = batch
        with torch.no_grad():
            made = self.g(tasks.noise(len(real)))
        told = self.d(torch.cat([real, made]))
        loss = F.softplus(-told[: len(real)]).mean() + F.softplus(told[len(real) :]).mean()
        self.d_optimizer.zero_grad()
        self.context.backward(loss)
        self.context.step_optimizer(self.d_optimizer)
        fooled = F.softplus(-self.d(self.g(tasks.noise(len(real))))).mean()
        self.g_optimizer.zero_grad()
        self.context.backward(fooled)
        self.context.step_optimizer(self.g_optimizer)
        return {"loss": fooled, "discriminator": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"error": F.softplus(-self.d(batch[0])).mean()}


class Finetuning(Trial):
    """A head on a frozen model; or, given the model, all of it with an optimizer of its own."""

    data = tasks.images(96, 1), tasks.images(64, 2)

    def __init__(self, context: Any, trained: Any = None) -> None:
        super().__init__(context)
        model = tasks.convolutions()
        if trained is None:
            for parameter in [*model.parameters()][:-2]:
                parameter.requires_grad = False
        else:
            model.load_state_dict(trained)
        self.model = context.wrap_model(model)
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if trained is None:
            made = torch.optim.SGD(learning, lr=0.1)
        else:
            made = torch.optim.Adam(learning, lr=0.01)
        self.optimizer = context.wrap_optimizer(account.watch("whole" if trained else "head", made))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        told = self.model(batch[0])
        return {"error": F.cross_entropy(told, batch[1]), "accuracy": (told.argmax(1) == batch[1]).float().mean()}


class Words(Trial):
    """Sentences whose number nothing divides; their words are counted over all ranks in each step."""

    data = tasks.sentences(53, 6), tasks.sentences(37, 7)
    batch = 4

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.model = context.wrap_model(tasks.words_model())
        adam = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.optimizer = context.wrap_optimizer(account.watch("adam", adam))
        self.accuracy = context.wrap_reducer(
            lambda parts: sum(part[0] for part in parts) / sum(part[1] for part in parts),
            name="accuracy", for_training=False, for_validation=True,
        )  # fmt: skip

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss, counts = tasks.next_word(self.model, batch[0])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=lambda p: nn.utils.clip_grad_norm_(p, 1.0))
        gathered = self.context.distributed.allgather(counts.sum(0).tolist())
        told, there = (sum(part[i] for part in gathered) for i in (0, 1))
        return {"loss": loss, "accuracy": told / there, "words": float(there)}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        loss, counts = tasks.next_word(self.model, batch[0])
        self.accuracy.update(counts.sum(0).tolist())
        return {"error": loss}


class Patience(pytorch.PyTorchCallback):  # type: ignore[misc, name-defined]
    """Stops when the error falls no more, and keeps the best model."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.best = float("inf")
        self.waited = 0
        self.kept = None

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if metrics["error"] < self.best - 0.02:
            self.best = metrics["error"]
            self.waited = 0
            self.kept = copy.deepcopy(self.trial.model.state_dict())
        else:
            self.waited += 1
            if self.waited == 2:
                self.trial.context.set_stop_requested(True)


class Regression(Trial):
    """Early stopping, and the best model kept."""

    data = tasks.curve(96, 8), tasks.curve(48, 9)

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.model = context.wrap_model(tasks.regression())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = context.wrap_optimizer(account.watch("sgd", sgd))
        self.patience = Patience(self)

    def build_callbacks(self) -> dict[str, Any]:
        return {**super().build_callbacks(), "patience": self.patience}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"error": F.mse_loss(self.model(batch[0]), batch[1])}


def train(make: type[Trial], epochs: int, **options: Any) -> Trial:
    """One training of one trial."""
    with opened() as context:
        trial = make(context)
        fit(trial, epochs, **options)
    return trial


def main() -> nn.Module:
    """Run the selected training and return its model."""
    if TRAINING == "images":
        return train(Images, 6).model
    if TRAINING == "gan":
        return train(Adversaries, 4).model
    if TRAINING == "tokens":
        return train(Words, 4).model
    if TRAINING == "regression":
        trial = train(Regression, 40, checkpoint_policy="best")
        account.note({"best": trial.patience.best})
        trial.model.load_state_dict(trial.patience.kept)
        return trial.model
    head = train(Finetuning, 2).model
    # DDP puts ``module.`` before each name, and the second trial loads them before it wraps its model.
    trained = {name.removeprefix("module."): value for name, value in head.state_dict().items()}
    with opened() as context:
        trial = Finetuning(context, trained)
        fit(trial, 3)
    return trial.model


if __name__ == "__main__":
    account.tell(main())
