"""Blocks of a trial's loop and of the bare loop in turn, in the same processes: ``_trial.py BLOCK PAIRS STEP_MS``.

Run by ``trial_loop`` as a script, alone or behind the launcher. The chief prints one JSON line: the ratios of steps per
second, ours to bare, and bare to bare beside, one for each pair of blocks, and the bare loop's microseconds a step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from det_core import pytorch

torch.set_num_threads(1)
BLOCK, PAIRS, STEP_MS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
RECORDS, BATCH, REPORT = 25_600, 64, 100
"""An epoch of 400 steps in one process, a report every 100."""


def data(records: int = RECORDS) -> TensorDataset:
    """Fetched item by item."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(records, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (records,), generator=generator))


def mlp() -> torch.nn.Module:
    """64 to 128 to 10."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def loss_of(model: Any, batch: Any) -> Any:
    """The forward pass; in the row of a 20 ms step it takes so long."""
    if STEP_MS:
        time.sleep(STEP_MS / 1e3)
    return F.cross_entropy(model(batch[0]), batch[1])


class Bare:
    """The loop without us, with the same work."""

    def __init__(self, rank: int, size: int) -> None:
        dataset = data()
        self.model = mlp() if size == 1 else torch.nn.parallel.DistributedDataParallel(mlp())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        sampler = torch.utils.data.DistributedSampler(dataset, size, rank) if size > 1 else None
        self.loader = DataLoader(dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
        self.batches = iter(self.loader)
        self.steps = 0

    def step(self, batch: Any) -> Any:
        """Train on a batch; its loss."""
        loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, steps: int) -> float:
        """Seconds for so many steps."""
        began, until = time.perf_counter(), self.steps + steps
        while self.steps < until:
            for batch in self.batches:
                loss = self.step(batch)
                self.steps += 1
                if self.steps % REPORT == 0:
                    loss.item()
                if self.steps == until:
                    return time.perf_counter() - began
            self.batches = iter(self.loader)
        return time.perf_counter() - began


class Turns:
    """A trial that is timed in blocks, between which the bare loops run theirs."""

    def begin(self, bare: list[Any]) -> None:
        """Before training; ``bare`` are two bare loops."""
        self.bare = bare
        self.began: float | None = None
        self.ours: list[float] = []
        self.others: list[tuple[float, float]] = []

    def block(self) -> None:
        """A block of ours is over: one of each bare loop, in an order that changes."""
        ours = None if self.began is None else time.perf_counter() - self.began
        order = self.bare if len(self.ours) % 2 else self.bare[::-1]
        took = {id(bare): bare.run(BLOCK) for bare in order}
        if ours is not None:
            self.ours.append(ours)
            self.others.append((took[id(self.bare[0])], took[id(self.bare[1])]))
        self.began = time.perf_counter()

    def tell(self) -> None:
        """Print the ratios."""
        ours, others = self.ours[1:], self.others[1:]  # the first block warms up
        ratios = [bare / mine for mine, (bare, _) in zip(ours, others, strict=True)]
        again = [second / first for first, second in others]
        micros = sorted(first for first, _ in others)[len(others) // 2] / BLOCK * 1e6
        print("RESULT " + json.dumps({"ratios": ratios, "again": again, "micros": micros}), flush=True)


class Trial(pytorch.PyTorchTrial, Turns):
    """The same as a trial; at the end of each block the bare loops run theirs."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(mlp())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        ranks = context.distributed
        self.begin([Bare(ranks.rank, ranks.size) for _ in range(2)])

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=BATCH, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long)), batch_size=1)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if (batch_idx + 1) % BLOCK == 0:
            self.block()
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}


def main() -> None:
    """Train, and print."""
    with pytorch.init(hparams={}) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(BLOCK * (PAIRS + 3)), reporting_period=pytorch.Batch(REPORT)
        )
        if context.distributed.rank == 0:
            trial.tell()


if __name__ == "__main__":
    main()
