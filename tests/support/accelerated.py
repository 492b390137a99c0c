"""A training by the accelerated Trainer with all that a resume may get wrong, and how to compare two of it."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

from support.killed import Restarted
from support.processes import until

SCRIPT = '''
import json, math, os, random, sys, time

given = lambda name, default: type(default)(os.environ.get(name, default))
import torch
from det_core import core
from det_core.accelerated import Trainer
from det_core.accelerated.callbacks import (
    EarlyStoppingCallback, ModelEmaCallback, SaveBestModelCallback, TerminateOnNaNCallback, TrainerCallback,
)
from det_core.accelerated.schedulers import CosineLrScheduler

EPOCHS, RECORDS, WORKERS, PACE = given("EPOCHS", 5), given("RECORDS", 72), given("WORKERS", 2), given("PACE", 0.01)
RANK, SIZE, EVERY, DATA = given("RANK", 0), given("WORLD_SIZE", 1), given("EVERY", "2"), given("DATA", ".")
KIND = given("KIND", "records")


class Noisy(torch.utils.data.Dataset):
    """Augmented: another record each time it is drawn."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        noise = (torch.rand(4) + random.random()) * 0.1
        return torch.full((4,), i / RECORDS) + noise, torch.tensor([i / RECORDS])


class Stream(torch.utils.data.IterableDataset):
    """A worker's share of the same records, in an order that the worker draws."""

    def __len__(self):
        return RECORDS

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        share = range(worker.id, RECORDS, worker.num_workers)
        return (Noisy()[share[i]] for i in torch.randperm(len(share)).tolist())


class OwnLoader(Trainer):
    """Trainer whose training loader is one that its user has made resumable."""

    def create_train_dataloader(self, *args, **kwargs):
        return core.resumable(super().create_train_dataloader(*args, **kwargs))


class Told(TrainerCallback):
    """Notes each batch in a file that outlives the process, and that random numbers may be drawn anywhere."""

    def on_train_epoch_start(self, trainer, **kwargs):
        torch.rand(1)

    def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
        records = (batch[1] * RECORDS).round().long().flatten().tolist()
        told = [trainer.run_history.current_epoch, step, records, batch[0].double().sum().item(), trainer.batch_loss]
        with open(f"{DATA}/data-{RUN}-{RANK}", "a") as file:
            file.write(json.dumps([os.getpid(), told]) + "\\n")
        time.sleep(PACE)

    def on_preempted(self, trainer, **kwargs):
        print("PREEMPTED at", trainer.steps_completed, flush=True)


def net():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )


def loaders():
    if not WORKERS:
        return {"num_workers": 0}
    # Forked beside torch.distributed's threads a worker may hang; those of a forkserver outlive a kill -9 of their
    # parent, where no launcher exists to end them.
    if SIZE == 1:
        return {"num_workers": WORKERS}
    torch.multiprocessing.set_forkserver_preload(["torch", "det_core.core", "det_core.accelerated", "accelerate"])
    return {"num_workers": WORKERS, "multiprocessing_context": "forkserver"}


def trainer(model, callbacks):
    cls = OwnLoader if KIND == "resumable stream" else Trainer
    return cls(model, torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01), callbacks)


def train(trainer, epochs=EPOCHS, **more):
    trainer.train(
        Noisy() if KIND == "records" else Stream(), epochs,
        eval_dataset=Noisy(), per_device_batch_size=8, gradient_accumulation_steps=2,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        train_dataloader_kwargs=loaders(), eval_dataloader_kwargs={"num_workers": 0},
        gradient_clip_norm=1.0, report_every=3, checkpoint_every=EVERY if EVERY == "epoch" else int(EVERY), **more,
    )
    print(f"DONE run {RUN} at", trainer.steps_completed, "preempted", trainer.preempted, flush=True)
'''
ONE_RUN = """
RUN = 1
if __name__ == "__main__":
    distributed = core.DistributedContext.detect() if SIZE > 1 else None
    with core.init(name="it", resume="latest", searcher_metric="eval_loss_epoch", distributed=distributed):
        ema = ModelEmaCallback(decay=0.9, update_every="step", save_path="ema.pt")
        best = SaveBestModelCallback(core_upload=True)
        train(trainer(net(), [TerminateOnNaNCallback, Told, ema, EarlyStoppingCallback(100), best]))
"""


class Training(Restarted):
    """A script of the accelerated Trainer that is started again and again."""

    def batches(self, run: int = 1) -> dict[tuple[int, int, int], list[Any]]:
        """Return all notes of each batch, by rank, epoch and step."""
        found: dict[tuple[int, int, int], list[Any]] = {}
        for rank in range(self.ranks):
            for _, (epoch, step, *what) in self._noted(run, rank):
                found.setdefault((rank, epoch, step), []).append(what)
        return found

    def pids(self, run: int = 1) -> list[int]:
        """Return the process IDs of the last start."""
        return [noted[-1][0] for rank in range(self.ranks) if (noted := self._noted(run, rank))]

    @property
    def printed(self) -> str:
        """The output of all starts."""
        return self.output if (self.folder / "output").exists() else ""

    def disturbed_at(self, batch: int, number: signal.Signals, rng: random.Random, *, run: int = 1) -> str:
        """Start it, and send a signal to one of its ranks once it noted so many more batches; return its output."""
        before, noted = len(self.printed), [len(self._noted(run, rank)) for rank in range(self.ranks)]
        process = self.start()
        more = [batch] + [1] * (self.ranks - 1)  # of each rank one at least, so that its last note is of this start
        until(
            lambda: all(len(self._noted(run, r)) >= noted[r] + more[r] for r in range(self.ranks)),
            lambda: self.output[before:],
            of=process,
        )
        os.kill(rng.choice(self.pids(run)), number)
        status = self.wait(process)
        printed = self.output[before:]
        assert (status != 0) == (number == signal.SIGKILL), (status, printed)
        return printed

    def finished(self) -> str:
        """Start it, wait for its end, and return its output."""
        before = len(self.printed)
        assert self.start().wait() == 0, self.output[before:]
        return self.output[before:]

    def _noted(self, run: int, rank: int) -> list[Any]:
        path = self.folder / f"data-{run}-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]]")]

    def ends(self) -> dict[str, Any]:
        """Return all that the newest checkpoint holds, of every rank."""
        return {"state.pt": self.state("state.pt")}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two states are equal to the last bit."""
    import torch

    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {one} {other}"
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    else:
        assert one == other, f"{where}: {one} {other}"


def script(folder: Path, ranks: int, code: str = ONE_RUN, **env: str) -> Training:
    """Return a script in a new directory."""
    return Training(folder, SCRIPT + code, ranks, env)
