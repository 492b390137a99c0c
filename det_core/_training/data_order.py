"""Order of the data as a function of seed, pass and batch, so that a resume within an epoch is exact.

In endless passes, batches are numbered over all ranks: batch ``n`` is batch ``n // size`` of rank ``n % size``. The
number of batches that a rank has trained is then its position, without a saved state of the loader.
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
"""Number that separates the seeds of batches in workers from those of passes."""


def mixed_seed(seed: int, *numbers: int) -> int:
    """Return a 63-bit seed for a seed and numbers, by splitmix64 (Steele, Lea and Flood 2014).

    Similar numbers give unrelated seeds.
    """
    x = seed & MASK
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x >> 1


@dataclass(frozen=True)
class Position:
    """Position of a training in its data.

    Attributes:
        seed: seed of orders and of random numbers in workers.
        batches: number of batches that each rank has trained.
        pass_: current pass over the dataset, of all ranks together.
        records: number of records of the pass that the ranks have received.
        global_batch_size: number of records in a batch of all ranks; None if it is unknown or varies.
        size: number of ranks.
    """

    seed: int
    batches: int
    pass_: int
    records: int
    global_batch_size: int | None
    size: int

    def to_dict(self) -> dict[str, int | None]:
        """Return a dictionary for JSON."""
        return {name.rstrip("_"): value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """Return the position from the return value of :meth:`to_dict`."""
        return cls(*(saved[field.name.rstrip("_")] for field in fields(cls)))


class SeededShuffle(Sampler[int]):
    """Permutations of ``size`` indices that depend on seed and pass alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._pass = 0

    def set_epoch(self, pass_: int) -> None:
        """Set the pass of the next iteration."""
        self._pass = pass_

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self._pass))
        yield from torch.randperm(self.size, generator=generator).tolist()


class NumberedBatches(Sampler[Any]):
    """Share of one rank in endless passes.

    Args:
        batches: batches of indices of a pass. If its ``sampler`` is a :class:`SeededShuffle`, passes before the first
            batch are not drawn.
        rank, size: this rank takes the batches ``n`` of the stream with ``n % size == rank``.
        skip: number of this rank's batches to skip.
        numbered: yield ``(n, indices)`` for a :class:`SeededDataset`.
    """

    def __init__(self, batches: Any, *, rank: int, size: int, skip: int, numbered: bool) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._skip = skip
        self._numbered = numbered

    def __len__(self) -> int:
        """Return the number of this rank's batches in the first pass; others may differ by one."""
        return share(len(self._batches), self._rank, self._size, even=False)

    def __iter__(self) -> Iterator[Any]:
        first = self._skip * self._size
        rank = self._rank
        size = self._size
        numbered = self._numbered
        for n, indices in self._stream(first):
            if n >= first and n % size == rank:
                if numbered:
                    yield n, indices
                else:
                    yield indices

    def _stream(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yield batches with their numbers, from ``first`` on or earlier."""
        shuffle = getattr(self._batches, "sampler", None)
        pass_ = 0
        n = 0
        if isinstance(shuffle, SeededShuffle) and len(self._batches):  # other samplers have to draw every pass
            pass_ = first // len(self._batches)
            n = pass_ * len(self._batches)
        while True:
            if isinstance(shuffle, SeededShuffle):
                shuffle.set_epoch(pass_)
            before = n
            for indices in self._batches:
                yield n, indices
                n += 1
            if n == before:
                raise RuntimeError("the training loader has no batch: its dataset is empty, or smaller than a batch")
            pass_ += 1


class EpochOrder(Sampler[Any]):
    """Share of one rank in an epoch. Each iteration repeats it unless ``epoch`` or the batches change.

    Args:
        batches: batches of indices of an epoch.
        rank, size: this rank takes the batches ``n`` with ``n % size == rank``.
        even: fill the last batches from the beginning of the epoch, so that all ranks have as many, of equal size.
        numbered: yield ``(n, indices)`` with a number ``n`` unique over all epochs, for a :class:`SeededDataset`.

    Attributes:
        epoch: epoch of the next iteration.
        first: first batch of the next iteration.
    """

    def __init__(self, batches: Any, *, rank: int, size: int, even: bool, numbered: bool) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._even = even
        self._numbered = numbered
        self.epoch = 0
        self.first = 0

    def __len__(self) -> int:
        return share(len(self._batches), self._rank, self._size, self._even)

    def __iter__(self) -> Iterator[Any]:
        size = self._size
        first = self.first
        batches = self._batches
        if self._even:
            batches = pad_evenly(batches, size)
        for n, indices in enumerate(batches):
            if n % size == self._rank and n // size >= first:
                if self._numbered:
                    yield (self.epoch << 32) + n, indices
                else:
                    yield indices


class SeededDataset(Dataset[Any]):
    """A dataset that seeds the generators of a worker from (seed, n) before batch n, whichever worker makes it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.order_seed = seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # pickle asks before __init__
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the dataset."""
        # In a worker, self is get_worker_info().dataset, whose attributes a worker_init_fn may set.
        if name in ("dataset", "order_seed"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbered: tuple[int, list[int]]) -> list[Any]:
        n, indices = numbered
        seed_generators(mixed_seed(self.order_seed, _WORKERS, n))
        get_items = getattr(self.dataset, "__getitems__", None)
        if callable(get_items):
            items: list[Any] = get_items(indices)
            return items
        return [self.dataset[i] for i in indices]


def share(whole: int, rank: int, size: int, even: bool) -> int:
    """Return the number of batches of one rank in an epoch."""
    if even:
        return -(-whole // size)
    return whole // size + (whole % size > rank)


def pad_evenly(batches: Any, size: int) -> Iterator[Any]:
    """Yield batches of an epoch, and fill the last ones so that ``size`` ranks have as many batches of equal size.

    They are filled with the first indices of the epoch, as accelerate's ``even_batches`` does. Batches of unknown size
    are repeated instead.
    """
    width = getattr(batches, "batch_size", None)
    if size == 1 or not isinstance(width, int):
        yield from repeat_first(batches, size)
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


def repeat_first(batches: Any, size: int) -> Iterator[Any]:
    """Yield batches of an epoch, and then its first ones, until ``size`` ranks have as many."""
    head: list[Any] = []
    n = -1
    for n, batch in enumerate(batches):
        if n < size - 1:
            head.append(batch)
        yield batch
    if head:
        yield from itertools.islice(itertools.cycle(head), -(n + 1) % size)


def length_of(sized: Any) -> int | None:
    """Return the length of a loader or dataset, or None if it has no length."""
    try:
        return len(sized)
    except TypeError:
        return None


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (on the CPU), Python and numpy."""
    torch.default_generator.manual_seed(seed)  # 1 µs, where torch.manual_seed() takes 140
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def rebuilt(loader: DataLoader[Any], order: Any, dataset: Any) -> DataLoader[Any]:
    """Return a copy of a loader with another order and dataset.

    Args:
        loader: loader with the other options (workers, collating, pinning; ``in_order`` is not copied).
        order: batches of keys of ``dataset``; single keys if ``loader`` does not batch (``batch_size=None``).
        dataset: the dataset.
    """
    options: dict[str, Any] = {"batch_sampler": order}
    if loader.batch_sampler is None:
        options = {"sampler": order, "batch_size": None}
    return DataLoader(
        dataset, **options, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context, persistent_workers=loader.persistent_workers,
        generator=torch.Generator().manual_seed(0),  # else iter() would draw from the global one
    )  # fmt: skip
