"""Trainings on two ranks of which one has an error of its loader together with the signal to stop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import TESTS
from support.ranks import watched

pytest.importorskip("torch")

SCRIPT = """
import os, pathlib, signal, sys
import torch
from torch.utils.data import Dataset, get_worker_info
from det_core import core

KIND, RANK, FAILS = sys.argv[1], int(os.environ["RANK"]), "FAILS" in os.environ
STEPS = 12


class Data(Dataset):
    def __init__(self, rows=4 * STEPS):
        self.rows = rows
        self.given = 0

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        self.given += 1
        if FAILS and self.given == 5:
            try:
                pathlib.Path("failed").touch(exist_ok=False)  # of all workers of both ranks one fails, once
            except FileExistsError:
                pass
            else:
                raise WithSignal("gone")
        return torch.rand(4) + i / 100


class WithSignal(OSError):
    # The signal comes when the training gets the error: between two calls of should_preempt().
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if get_worker_info() is None:
            os.kill(os.getpid(), signal.SIGTERM)


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def accelerated(ctx):
    from det_core.accelerated import Trainer

    class Fit(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(batch).square().mean(), "batch_size": len(batch)}

    model = net()
    trainer = Fit(model, None, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5), callbacks=[])
    trainer.train(Data(), 1, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 2})
    return model


def trial(ctx):
    from det_core import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context):
            self.context = context
            self.model = context.wrap_model(net())
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.5))

        def build_training_data_loader(self):
            return pytorch.DataLoader(Data(), 2, shuffle=True, num_workers=2)

        def build_validation_data_loader(self):
            return pytorch.DataLoader(Data(4), 2)

        def train_batch(self, batch, epoch_idx, batch_idx):
            loss = self.model(batch).square().mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch):
            return {"loss": 0.0}

    with pytorch.init(hparams={}, core_context=ctx) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(STEPS))
        return trial.model.module


with core.init(name="it", resume="latest", distributed=core.DistributedContext.detect()) as ctx:
    model = {"accelerated": accelerated, "trial": trial}[KIND](ctx)
    word = "PREEMPTED" if ctx.preempt.reason == "signal" else "END"
    print(word, RANK, [p.detach().flatten().tolist() for p in model.parameters()], flush=True)
"""


@pytest.mark.parametrize("kind", ["accelerated", "trial"])
def test_loader_of_one_rank_that_fails_with_the_signal_loses_nothing(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(home: str, **more: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(TESTS), "DET_CORE_HOME": str(tmp_path / home), **more}
        return watched([script, kind], 2, env=env, cwd=tmp_path)

    stopped = run("stopped", FAILS="1")
    assert stopped.count("the loader failed during a stop; reopening it") == 1
    assert stopped.count("PREEMPTED") == 2
    resumed, straight = run("stopped"), run("straight")
    ends = [sorted(line for line in text.splitlines() if line.startswith("END")) for text in (resumed, straight)]
    assert len(ends[0]) == 2 and ends[0] == ends[1]
