"""The five for pytorch-accelerated's Trainer. ``of_trainer.py PACKAGE TRAINING``: only the package's name differs.

Nothing is shuffled, so that both see the same batches; what a step draws comes from a generator of the script's own.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tasks  # type: ignore[import-not-found]
import torch
from torch import nn

PACKAGE, TRAINING = sys.argv[1:3]
trainers = importlib.import_module(f"{PACKAGE}.trainer")
callbacks = importlib.import_module(f"{PACKAGE}.callbacks")
finetuning = importlib.import_module(f"{PACKAGE}.finetuning")
account = tasks.Account()
PLAIN = {"num_workers": 0, "shuffle": False}
QUIET = (callbacks.MoveModulesToDeviceCallback, callbacks.TerminateOnNaNCallback)


def told(trainer: Any) -> None:
    """Record the history of a training, and its weights."""
    for name in sorted(trainer.run_history.get_metric_names()):
        for value in trainer.run_history.get_metric_values(name):
            account.note({name: value})


def train_images() -> nn.Module:
    """Mixup, an average of the weights, a scheduler of timm's."""
    from timm.scheduler import CosineLRScheduler  # type: ignore[import-not-found]

    class Mixing(trainers.TrainerWithTimmScheduler):  # type: ignore[misc, name-defined]
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            found: dict[str, Any] = super().calculate_train_batch_loss(tasks.mixed(*batch))
            return found

    model = tasks.convolutions()
    optimizer = account.watch("adam", torch.optim.AdamW(model.parameters(), lr=0.01))
    ema = callbacks.ModelEmaCallback(decay=0.9, save_path=f"ema_{PACKAGE}.pt", callbacks=QUIET)
    trainer = Mixing(model, nn.functional.cross_entropy, optimizer, callbacks=(*QUIET, ema))
    trainer.train(
        tasks.images(96, 1), num_epochs=6, eval_dataset=tasks.images(64, 2), per_device_batch_size=8,
        create_scheduler_fn=lambda o: CosineLRScheduler(o, t_initial=20, warmup_t=2, warmup_lr_init=0.001),
        train_dataloader_kwargs=PLAIN, eval_dataloader_kwargs=PLAIN,
    )  # fmt: skip
    told(trainer)
    return model


def train_gan() -> nn.Module:
    """Two optimizers: one within the step, one as the Trainer does it."""

    class Adversaries(trainers.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, model: tasks.Gan, *, optimizer: Any, other: Any) -> None:
            super().__init__(model, None, optimizer, callbacks=QUIET)
            self.other = other

        def _create_accelerator(self) -> Any:
            from accelerate import Accelerator, DistributedDataParallelKwargs

            # Each backward pass is of one part, and DDP by default expects gradients of both.
            return Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])

        def training_run_start(self) -> None:
            self.other = self._accelerator.prepare(self.other)

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            (real,) = batch
            self.other.zero_grad()
            loss = self.model("discriminator", tasks.noise(len(real)).to(self.device), real)
            self._accelerator.backward(loss)
            self.other.step()
            self.run_history.update_metric("discriminator", self.gather(loss.detach().reshape(1)).mean().item())
            self.optimizer.zero_grad()
            made = self.model("generator", tasks.noise(len(real)).to(self.device), real)
            return {"loss": made, "model_outputs": None, "batch_size": len(real)}

    model = tasks.Gan()
    parts = [("generator", model.generator), ("discriminator", model.discriminator)]
    first, second = (account.watch(n, torch.optim.Adam(part.parameters(), lr=0.02)) for n, part in parts)
    trainer = Adversaries(model, optimizer=first, other=second)
    trainer.train(tasks.points(64), num_epochs=4, per_device_batch_size=8, train_dataloader_kwargs=PLAIN)
    told(trainer)
    return model


def train_finetuning() -> nn.Module:
    """Frozen but for its head; then all of it, by an optimizer that is made after unfreezing."""
    model = tasks.convolutions()
    freezer = finetuning.ModelFreezer(model)
    freezer.freeze(0, -2)
    head = account.watch("head", torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1))
    trainer = trainers.Trainer(model, nn.functional.cross_entropy, head, callbacks=QUIET)
    kinds = dict(eval_dataset=tasks.images(64, 2), per_device_batch_size=8)
    loading = dict(train_dataloader_kwargs=PLAIN, eval_dataloader_kwargs=PLAIN)
    trainer.train(tasks.images(96, 1), num_epochs=2, **kinds, **loading)
    told(trainer)
    freezer.unfreeze(0, -1)
    trainer.optimizer = account.watch("whole", torch.optim.Adam(model.parameters(), lr=0.01))
    trainer.train(tasks.images(96, 1), num_epochs=3, **kinds, **loading)
    told(trainer)
    return model


def train_tokens() -> nn.Module:
    """Sentences whose number nothing divides; their words are counted over all ranks in each step."""

    class Words(trainers.Trainer):  # type: ignore[misc, name-defined]
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            (words,) = batch
            loss, counts = tasks.next_word(self.model, words)
            told, there = self.gather(counts).sum(0).tolist()
            self.run_history.update_metric("train_accuracy", told / there)
            lengths = (self.gather(words, padding_value=tasks.PADDING) != tasks.PADDING).sum()
            self.run_history.update_metric("train_words", lengths.item())
            return {"loss": loss, "model_outputs": counts, "batch_size": len(words)}

        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            with torch.no_grad():
                loss, counts = tasks.next_word(self.model, batch[0])
            self.told += self._accelerator.gather_for_metrics(counts).sum(0)
            return {"loss": loss, "model_outputs": counts, "batch_size": len(batch[0])}

        def eval_epoch_start(self) -> None:
            super().eval_epoch_start()
            self.told = torch.zeros(2, dtype=torch.long, device=self.device)

        def eval_epoch_end(self) -> None:
            self.run_history.update_metric("eval_accuracy", (self.told[0] / self.told[1]).item())

    model = tasks.words_model()
    optimizer = account.watch("adam", torch.optim.Adam(model.parameters(), lr=0.02))
    trainer = Words(model, None, optimizer, callbacks=QUIET)
    trainer._pad_uneven_eval_batches = True
    trainer.train(
        tasks.sentences(53, 6), num_epochs=4, eval_dataset=tasks.sentences(37, 7), per_device_batch_size=4,
        train_dataloader_kwargs=PLAIN, eval_dataloader_kwargs=PLAIN,
    )  # fmt: skip
    told(trainer)
    return model


def train_regression() -> nn.Module:
    """Train until the error stops falling, and keep the best model."""
    model = tasks.regression()
    optimizer = account.watch("sgd", torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    watching = (
        callbacks.SaveBestModelCallback(save_path=f"best_{PACKAGE}.pt"),
        callbacks.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.02),
    )
    trainer = trainers.Trainer(model, nn.MSELoss(), optimizer, callbacks=(*QUIET, *watching))
    trainer.train(
        tasks.curve(96, 8), num_epochs=40, eval_dataset=tasks.curve(48, 9), per_device_batch_size=8,
        train_dataloader_kwargs=PLAIN, eval_dataloader_kwargs=PLAIN,
    )  # fmt: skip
    told(trainer)
    account.note({"best": watching[0].best_metric, "best epoch": watching[0].best_metric_epoch})
    return model


if __name__ == "__main__":
    account.tell(globals()[f"train_{TRAINING}"]())
