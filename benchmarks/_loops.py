"""Bare training loop that trainers are compared with, block by block in the same processes.

A trainer, ours or a peer, calls :meth:`Turns.step` once a step. At the end of each of its blocks two bare loops run one
of the same length, in alternating order: their ratio (A/A) shows the noise of the machine, and a row whose A/A is off
by more than 3 % means nothing.

The work is so tiny that what a trainer adds shows: a model of 64 to 128 to 10, batches of 64 fetched item by item.
"""

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks._bench import Table, at_least
from benchmarks._processes import answer

BATCH = 64
REPORT = 100
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
# Not os.cpu_count(), which counts the machine's also where a process may use only some of them.
CORES = len(os.sched_getaffinity(0))
COLUMNS = ("ratio", "quartiles", "CPU ratio", "A/A", "bare, µs a step", "pairs")


def row(table: Table, name: str, found: Mapping[str, Any], bound: float | None = None) -> float:
    """Add a row of the figures of :meth:`Turns.found`, and return the ratio of speeds, ours to bare."""
    ratio = float(statistics.median(found["ratios"]))
    again = statistics.median(found["again"])
    quarters = statistics.quantiles(found["ratios"])
    believed = f"{again:.3f}" + ("" if 0.97 <= again <= 1.03 else ", off")
    cells = (f"{quarters[0]:.3f} to {quarters[2]:.3f}", statistics.median(found["cpu"]), believed, found["micros"])
    table.row(name, ratio, *cells, len(found["ratios"]), bound=None if bound is None else at_least(ratio, bound))
    return ratio


def blocks(code: str, package: str, block: int, pairs: int, step_ms: float = 0.0, **options: Any) -> Any:
    """Run a snippet, which answers with :meth:`Turns.found`, on one rank, or with ``ranks=2`` behind our launcher."""
    launcher: tuple[str, ...] = ()
    if options.pop("ranks", 1) > 1:
        launcher = ("-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2")
    return answer(code, package, block, pairs, step_ms, launcher=launcher, **options)


class Bare:
    """Loop without a trainer, with the same work."""

    def __init__(self, records: int = 25_600, step_ms: float = 0.0) -> None:
        import torch
        from torch.utils.data import DataLoader, DistributedSampler

        dataset = data(records)
        self.step_ms = step_ms
        self.steps = 0
        self.make(torch)
        sampler: Any = DistributedSampler(dataset, RANKS, RANK) if RANKS > 1 else None
        self.loader: Any = DataLoader(dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
        self.batches = iter(self.loader)

    def make(self, torch: Any) -> None:
        """Make the model and its optimizer."""
        if RANKS == 1:
            self.model = mlp()
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(mlp())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch: Any) -> Any:
        """Train on a batch and return its loss."""
        loss = loss_of(self.model, batch, self.step_ms)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, steps: int) -> tuple[float, float]:
        """Train for some steps and return their wall and processor seconds."""
        began = clocks()
        until = self.steps + steps
        while self.steps < until:
            # Goes on within the epoch: a trainer makes an iterator once an epoch, not once a block.
            for batch in self.batches:
                loss = self.step(batch)
                self.steps += 1
                if self.steps % REPORT == 0:
                    # As a script that prints its loss: the trainers read theirs as often, to report it.
                    loss.item()
                if self.steps == until:
                    break
            else:
                self.batches = iter(self.loader)
        return since(began)


class Turns:
    """Timer of a trainer in blocks of steps, which alternate with those of bare loops."""

    def __init__(self, block: int, bare: list[Bare]) -> None:
        self.block = block
        self.bare = bare
        self.steps = 0
        self.began: tuple[float, float] | None = None
        self.ours: list[tuple[float, float]] = []
        self.others: list[list[tuple[float, float]]] = []

    def step(self) -> None:
        """Count a step of the trainer; at the end of a block, run the bare loops."""
        self.steps += 1
        if self.steps % self.block:
            return
        # No clock ran in the first block, in which a trainer still starts what it starts once.
        if self.began is None:
            ours = None
        else:
            ours = since(self.began)
        # The one that runs first finds the caches as the trainer left them, so each is first as often.
        if len(self.ours) % 2:
            order = (0, 1)
        else:
            order = (1, 0)
        took = dict(zip(order, [self.bare[which].run(self.block) for which in order], strict=True))
        if ours is not None:
            self.ours.append(ours)
            self.others.append([took[0], took[1]])
        self.began = clocks()

    def found(self) -> dict[str, Any]:
        """Return the ratios of speeds, ours to bare by wall and by processor time, and bare to bare."""
        # Without the first block, which warms up.
        pairs = [*zip(self.ours, self.others, strict=True)][1:]
        return {
            "ratios": [bare[0][0] / ours[0] for ours, bare in pairs],
            "cpu": [bare[0][1] / ours[1] for ours, bare in pairs],
            "again": [bare[1][0] / bare[0][0] for _, bare in pairs],
            "micros": statistics.median(bare[0][0] for _, bare in pairs) / self.block * 1e6,
        }


def clocks() -> tuple[float, float]:
    """Return wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return wall and processor seconds since ``began``."""
    wall, cpu = clocks()
    return wall - began[0], cpu - began[1]


def data(records: int) -> Any:
    """Return a data set that is fetched item by item."""
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(records, 64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 10, (records,), generator=generator))


def mlp() -> Any:
    """Return a network of 64 to 128 to 10."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def loss_of(model: Any, batch: Any, step_ms: float = 0.0) -> Any:
    """Run the forward pass, for ``step_ms`` milliseconds at least, and return the loss."""
    import torch

    if step_ms:
        time.sleep(step_ms / 1e3)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
