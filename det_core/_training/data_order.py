"""The order of the data as a function of seed, pass and batch: what makes a resume in the middle of an epoch exact.

Batches are numbered over all ranks: batch ``n`` of the endless stream of passes is the ``n // size``-th of rank
``n % size``. So the number of batches that a rank has trained is its position, and no state of a loader is saved.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

MASK = (1 << 64) - 1
_WORKERS = 1 << 32
"""Tells the seeds of batches in workers from those of passes."""


def mixed_seed(seed: int, *numbers: int) -> int:
    """A seed of 63 bits from a seed and numbers, by splitmix64 (Steele, Lea and Flood 2014): neighbours get unrelated
    ones."""
    x = seed & MASK
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x >> 1


@dataclass(frozen=True)
class Position:
    """Where a training is in its data.

    Attributes:
        seed: what orders and workers' random numbers come from.
        batches: how many a rank has trained.
        pass_: the pass over the dataset that the ranks are in together.
        records: how many records of it they have been given.
        global_batch_size: records in a batch of all ranks; None: it is not known, or differs.
        size: how many ranks there are.
    """

    seed: int
    batches: int
    pass_: int
    records: int
    global_batch_size: int | None
    size: int

    def to_dict(self) -> dict[str, int | None]:
        """For JSON."""
        return {name.rstrip("_"): value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """From what :meth:`to_dict` gave."""
        return cls(*(saved[field.name.rstrip("_")] for field in fields(cls)))


class SeededShuffle(Sampler[int]):
    """The permutation of a pass of ``size`` indices, from seed and pass alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._pass = 0

    def set_epoch(self, pass_: int) -> None:
        """Say which pass is next."""
        self._pass = pass_

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self._pass))
        yield from torch.randperm(self.size, generator=generator).tolist()


class NumberedBatches(Sampler[Any]):
    """One rank's share of pass after pass, without end, from some batch on.

    Args:
        batches: the batches of indices of a pass; where its ``sampler`` is a :class:`SeededShuffle`, the passes before
            the first batch are never drawn.
        rank, size: this rank takes the batches ``n`` of the stream with ``n % size == rank``.
        skip: how many of its batches to pass over.
        numbered: yield ``(n, indices)``, for a :class:`SeededDataset`.
    """

    def __init__(self, batches: Any, *, rank: int, size: int, skip: int, numbered: bool) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._skip = skip
        self._numbered = numbered

    def __len__(self) -> int:
        """How many batches of a pass are this rank's."""
        return share(len(self._batches), self._rank, self._size, even=False)

    def __iter__(self) -> Iterator[Any]:
        first = self._skip * self._size
        rank = self._rank
        size = self._size
        numbered = self._numbered
        for n, indices in self._stream(first):
            if n >= first and n % size == rank:
                yield (n, indices) if numbered else indices

    def _stream(self, first: int) -> Iterator[tuple[int, Any]]:
        """Every batch with its number, at least from ``first`` on."""
        shuffle = getattr(self._batches, "sampler", None)
        shuffle = shuffle if isinstance(shuffle, SeededShuffle) else None
        pass_ = first // len(self._batches) if shuffle is not None and len(self._batches) else 0
        n = pass_ * len(self._batches) if pass_ else 0
        while True:
            if shuffle is not None:
                shuffle.set_epoch(pass_)
            before = n
            for indices in self._batches:
                yield n, indices
                n += 1
            if n == before:
                raise RuntimeError("the training loader gives no batch: its dataset is empty, or smaller than a batch")
            pass_ += 1


class EpochOrder(Sampler[Any]):
    """This rank's share of the batches of indices of an epoch: of the same one again and again, as validation wants it,
    unless ``epoch`` and ``first``, its first batch, are set before it is iterated.

    Args:
        batches: all batches of indices of an epoch.
        rank, size: this rank takes the batches ``n`` with ``n % size == rank``.
        even: fill the last batches of the ranks from the epoch's beginning, so that all have equally many, of one size.
        numbered: yield ``(n, indices)``, ``n`` counted through all epochs, for a :class:`SeededDataset`.
    """

    def __init__(self, batches: Any, *, rank: int, size: int, even: bool, numbered: bool) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._even = even
        self._numbered = numbered
        self.epoch = self.first = 0

    def __len__(self) -> int:
        return share(len(self._batches), self._rank, self._size, self._even)

    def __iter__(self) -> Iterator[Any]:
        size = self._size
        first = self.first
        number = self.epoch << 32 if self._numbered else 0
        for n, indices in enumerate(evened(self._batches, size) if self._even else self._batches):
            if n % size == self._rank and n // size >= first:
                yield (number + n, indices) if self._numbered else indices


class SeededDataset(Dataset[Any]):
    """Seeds a worker's generators from (seed, n) before it makes batch n, so that it matters not which worker does."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.order_seed = seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # asked for by pickle before there is any
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """In a worker this is ``get_worker_info().dataset``, which a ``worker_init_fn`` may give attributes."""
        if name in ("dataset", "order_seed"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbered: tuple[int, list[int]]) -> list[Any]:
        n, indices = numbered
        seed_generators(mixed_seed(self.order_seed, _WORKERS, n))
        many = getattr(self.dataset, "__getitems__", None)
        found: list[Any] = many(indices) if callable(many) else [self.dataset[i] for i in indices]
        return found


def share(whole: int, rank: int, size: int, even: bool) -> int:
    """How many of an epoch's batches a rank gets."""
    return -(-whole // size) if even else whole // size + (whole % size > rank)


def evened(batches: Any, size: int) -> Iterator[Any]:
    """An epoch's batches of indices; with several ranks the last ones are filled with the epoch's first indices until
    each of ``size`` ranks has equally many batches of one size, as accelerate's ``even_batches`` does it. Batches
    whose size is not known are repeated as they are.
    """
    width = getattr(batches, "batch_size", None)
    if size == 1 or not isinstance(width, int):
        yield from completed(batches, size)
        return
    head: list[Any] = []
    n = -1
    last = None
    for n, batch in enumerate(batches):
        if last is not None:
            yield last
        last = list(batch)
        if n < size:
            head.extend(last)
    if last is None:
        return
    fill = itertools.cycle(head)
    yield last + list(itertools.islice(fill, max(width - len(last), 0)))
    for _ in range(-(n + 1) % size):
        yield list(itertools.islice(fill, width))


def completed(batches: Any, size: int) -> Iterator[Any]:
    """An epoch's batches, and its first ones again until each of ``size`` ranks has equally many."""
    head: list[Any] = []
    n = -1
    for n, batch in enumerate(batches):
        if n < size - 1:
            head.append(batch)
        yield batch
    if head:
        yield from itertools.islice(itertools.cycle(head), -(n + 1) % size)


def length_of(sized: Any) -> int | None:
    """How many batches a loader has, or records a dataset; None: it does not know."""
    try:
        return len(sized)
    except TypeError:
        return None


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (the CPU's: 1 µs; ``torch.manual_seed`` takes 140), python and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def rebuilt(loader: DataLoader[Any], order: Any, dataset: Any) -> DataLoader[Any]:
    """A loader like another, of a dataset in an order.

    It has a generator of its own, so that making an iterator draws nothing from the global one.

    Args:
        loader: how batches are made: workers, collating, pinning.
        order: batches of what ``dataset`` takes; single indices where ``loader`` does not make batches
            (``batch_size=None``).
        dataset: the dataset.
    """
    given = {"sampler": order, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": order}
    return DataLoader(
        dataset, **given, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context, persistent_workers=loader.persistent_workers,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
