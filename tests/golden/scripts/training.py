"""Trains as its words say, ``trainer=NAME`` or ``trial=NAME``, one after the other; NAME is a run, and is resumed.

Its variables: END, after how many updates its chief asks itself to stop; MEETING, a file by which two ranks meet.
All numbers are dyadic, and doubles hold each of them exactly: every processor comes to the same bits.
"""

import json
import os
import signal
import sys
from functools import partial

import torch
from torch.utils.data import TensorDataset

from det_core import core, pytorch
from det_core.accelerated import Trainer
from det_core.accelerated.callbacks import EarlyStoppingCallback, TrainerCallback

RANK, SIZE, END = (int(os.environ.get(*given)) for given in (("RANK", "0"), ("WORLD_SIZE", "1"), ("END", "0")))
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=8, gamma=0.5)
numbers = torch.arange(16, dtype=torch.float64)
inputs = torch.stack([numbers % 3 - 1, numbers // 3 % 3 - 1], 1)
dataset = TensorDataset(inputs, inputs @ torch.tensor([[2.0], [-1.0]], dtype=torch.float64) + 1)


class Model(torch.nn.Module):
    """A line through inputs of which random ones are missing."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1, dtype=torch.float64)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, inputs):
        """Return one number a row."""
        return self.line(inputs * torch.randint(0, 2, inputs.shape) if self.training else inputs)


def updated(updates):
    """Stop this start once it has made its share of updates."""
    if RANK == 0 and updates == END:
        os.kill(os.getpid(), signal.SIGTERM)


def ended(name, model, optimizer):
    """Print all that the next update would depend on."""
    momentum = [optimizer.state[p]["momentum_buffer"].tolist() for p in model.parameters()]
    told = [[p.tolist() for p in model.parameters()], momentum, optimizer.param_groups[0]["lr"], torch.rand(1).item()]
    print("ENDED", json.dumps([name, RANK, told]), flush=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


class Stops(TrainerCallback):
    def on_update(self, trainer, **kwargs):
        updated(trainer.steps_completed)


def train_trainer(name):
    distributed = core.DistributedContext.detect()
    manual = core.TensorboardMode.MANUAL
    with core.init(name=name, resume="latest", distributed=distributed, tensorboard_mode=manual):
        model = Model()
        callbacks = [Stops, EarlyStoppingCallback(100)]
        trainer = Trainer(model, torch.nn.functional.mse_loss, sgd(model), callbacks)
        loader = {"num_workers": 0}
        trainer.train(
            dataset, 2, dataset, 2, create_scheduler_fn=HALVED, report_every=1, checkpoint_every=100,
            train_dataloader_kwargs=loader, eval_dataloader_kwargs=loader,
        )  # fmt: skip
        ended(name, trainer.model, trainer.optimizer)


class Counts(pytorch.PyTorchCallback):
    def __init__(self):
        self.epochs = 0

    def on_training_epoch_end(self, epoch_idx):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(Model())
        self.optimizer = context.wrap_optimizer(sgd(self.model))
        context.wrap_lr_scheduler(HALVED(self.optimizer), pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def build_callbacks(self):
        return {"counts": Counts()}

    def build_training_data_loader(self):
        return pytorch.DataLoader(dataset, batch_size=2, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(dataset, batch_size=2)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        updated(batch_idx + 1)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"error": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}


def train_trial(name):
    torch.manual_seed(5)
    ranks = core.DistributedContext.detect()
    with pytorch.init(
        hparams={},
        enable_tensorboard_logging=False,
        distributed=ranks,
        name=name,
        resume="latest",
        searcher_metric="error",
    ) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(2), validation_period=pytorch.Epoch(1), reporting_period=pytorch.Batch(1),
            checkpoint_policy="none",
        )  # fmt: skip
        ended(name, trial.model, trial.optimizer)


if __name__ == "__main__":
    if SIZE > 1:
        meeting = f"file://{os.environ['MEETING']}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=SIZE)
    for word in sys.argv[1:]:
        kind, name = word.split("=")
        {"trainer": train_trainer, "trial": train_trial}[kind](name)
    if SIZE > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
