"""Loaders of every form, whose datasets draw random numbers, for tests of ``core.resumable()``."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from det_core import core

RECORDS = 22
BATCH_SIZE = 4


def augmented(index: int) -> torch.Tensor:
    """Return a record: its number, and one number of each global generator."""
    return torch.tensor([index, torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class Augmenting(Dataset[Any]):
    """Records that differ each time they are read."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return augmented(index)


class OwnGenerators(Augmenting):
    """Records that draw from generators of the dataset."""

    def __init__(self) -> None:
        self.transforms = [{"rng": numpy.random.default_rng(3)}, numpy.random.RandomState(4), random.Random(5)]

    def __getitem__(self, index: int) -> torch.Tensor:
        held, legacy, python = self.transforms
        return torch.tensor([index, held["rng"].random(), legacy.rand(), python.random()], dtype=torch.float64)


class Plain(Dataset[Any]):
    """Records that are always the same.

    Attributes:
        read: the numbers of those that were read, in order.
    """

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[Any]):
    """An uneven share of the records for each worker."""

    def __init__(self, records: int = RECORDS) -> None:
        self.records = records

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.records, step):
            yield augmented(index)
        torch.rand(())


class ShuffledStream(Stream):
    """A shuffled share of the records for each worker, in an order that is drawn before there is an iterator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        share = len(range(worker.id, self.records, worker.num_workers)) if worker else self.records
        return map(augmented, torch.randperm(share).tolist())


class CountingSampler(Sampler[int]):
    """An order of its own in each pass, of which it keeps count, drawn as it goes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(6)
        self.passes = 0

    def __len__(self) -> int:
        return RECORDS

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for _ in range(RECORDS):
            drawn = torch.randint(RECORDS, (), generator=self.generator).item()
            yield (int(drawn) + self.passes) % RECORDS


class OddBatches(Sampler[list[int]]):
    """Batches of one, two and three shuffled records, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(RECORDS).tolist()
        while order:
            for size in (1, 2, 3):
                if batch := order[:size]:
                    yield batch
                del order[:size]


def _loader(dataset: Any = Augmenting, **options: Any) -> Callable[..., DataLoader[Any]]:
    def make(**more: Any) -> DataLoader[Any]:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return DataLoader(**({"dataset": dataset(), "batch_size": BATCH_SIZE} | made | more))

    return make


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


FORMS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": _loader(),
    "shuffled": _loader(shuffle=True),
    "whole batches": _loader(shuffle=True, drop_last=True),
    "own generator": _loader(shuffle=True, generator=_generator, batch_size=11),
    "generators of the dataset": _loader(OwnGenerators, shuffle=True),
    "counting sampler": _loader(sampler=CountingSampler),
    "batch sampler": _loader(batch_sampler=lambda: BatchSampler(CountingSampler(), 3, False), batch_size=1),
    "odd batches": _loader(batch_sampler=OddBatches, batch_size=1),
    "single records": _loader(shuffle=True, batch_size=None),
    "stream": _loader(Stream),
    "shuffled stream": _loader(ShuffledStream),
    "stream of whole batches": _loader(Stream, drop_last=True),
    "distributed": _loader(sampler=lambda: DistributedSampler(Augmenting(), 2, 1)),
}
DRAWING = ("shuffled", "own generator", "generators of the dataset", "counting sampler", "odd batches", "stream")
"""Forms that draw random numbers at different places."""


def train(loader: Any, epochs: int, first: int = 0, states: list[Any] | None = None) -> list[Any]:
    """Go through a loader as a script that draws random numbers of its own; return what it saw, batch by batch.

    Args:
        loader: a DataLoader, or a resumable one.
        epochs: the number of the epoch to end before.
        first: the epoch to begin with.
        states: filled with the states of loader and generators before all, after each batch and after each epoch.
    """
    rows: list[Any] = []

    def save() -> None:
        if states is not None:
            file = io.BytesIO()
            torch.save((len(rows), loader.state_dict(), core.random_state()), file)
            states.append(file.getvalue())

    save()
    for epoch in range(first, epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        elif hasattr(loader, "set_epoch"):  # prepared by accelerate
            loader.set_epoch(epoch)
        for batch in loader:
            rows.append(
                [epoch, torch.as_tensor(batch).tolist(), torch.rand(()).item(), numpy.random.rand(), random.random()]
            )
            save()
        rows.append([epoch, "validated", torch.rand(()).item()])
        save()
    return rows


def resume(loader: Any, saved: bytes, epochs: int) -> tuple[int, list[Any]]:
    """Load what :func:`train` saved into a new loader; return how many rows there were, and those that follow."""
    rows, position, generators = torch.load(io.BytesIO(saved), weights_only=True)
    core.set_random_state(generators)
    loader.load_state_dict(position)
    return rows, train(loader, epochs, loader.epoch)


def seed(number: int) -> None:
    """Seed the global generators, as a process that has just started would have them."""
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def check(form: str, *, every: int, skip_loading: bool = False, epochs: int = 3, **options: Any) -> None:
    """Compare a loader alone, one that is resumable, and others that are resumed at every so manieth moment of it.

    Of workers that persist the loader alone has the same records in an order that is not drawn in the workers, and what
    is drawn there is compared with itself.
    """

    def make() -> core.ResumableLoader[Any]:
        return core.resumable(FORMS[form](**options), skip_loading=skip_loading)

    seed(1)
    expected = train(FORMS[form](**options), epochs)
    states: list[bytes] = []
    seed(1)
    rows = train(make(), epochs, states=states)
    if options.get("persistent_workers"):
        if form != "shuffled stream":
            assert without_augmentation(rows) == without_augmentation(expected)
        expected = rows
    assert rows == expected
    for saved in states[::every]:
        seed(2)
        done, rest = resume(make(), saved, epochs)
        assert rest == expected[done:], f"resumed after {done} rows"


def without_augmentation(rows: list[Any]) -> list[Any]:
    """Return what :func:`train` saw, with the numbers of the records alone."""
    shortened = []
    for epoch, batch, *drawn in rows:
        records = batch if batch == "validated" else torch.as_tensor(batch)
        if isinstance(records, torch.Tensor) and records.is_floating_point():
            batch = records[..., 0].tolist()
        shortened.append([epoch, batch, *drawn])
    return shortened


TRAINING = """
import os, sys
import numpy, random, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from det_core import core

EPOCHS = 8


class Data(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, i):
        return torch.full((8,), i / 120) + torch.rand(8) + numpy.random.rand() + random.random()


distributed = core.DistributedContext.detect()
rank, size = distributed.rank, distributed.size
torch.manual_seed(rank)
numpy.random.seed(rank)
random.seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if size > 1:
    torch.distributed.init_process_group("gloo")
net = DistributedDataParallel(model) if size > 1 else model
sampler = DistributedSampler(Data(), size, rank) if size > 1 else None
loader = DataLoader(
    Data(), 4, shuffle=sampler is None, sampler=sampler, num_workers=int(os.environ["WORKERS"]),
    persistent_workers=os.environ["KIND"] == "persistent",
)
loader = core.resumable(loader, skip_loading=os.environ["KIND"] == "skipped")
with core.init(distributed=distributed, name="resumable", resume="latest") as ctx:
    step = ctx.steps_completed
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["ranks"][rank]["loader"])
            core.set_random_state(saved["ranks"][rank]["random"])
    for epoch in range(loader.epoch, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            loss = net(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                ctx.train.report_training_metrics(step, {"loss": loss.item(), "sum": batch.double().sum().item()})
            if step % 7 == 0:
                ranks = distributed.gather({"loader": loader.state_dict(), "random": core.random_state()})
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ranks": ranks}
                    ctx.checkpoint.save(state, {"steps_completed": step})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
"""
"""A training with a loader that is given by the variables WORKERS and KIND, on one rank or several."""
