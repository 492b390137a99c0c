"""Samplers and batch samplers that repeat, distribute over ranks, skip, and shuffle reproducibly.

Use them in a custom loader, in the order repeat, distribute, skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, Sampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
]


class _Repeat:
    """Endless passes. The length is that of one pass."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for item in self._sampler:
                empty = False
                yield item
            if empty:
                raise RuntimeError("the training loader has no batch: its dataset is empty, or smaller than a batch")


class _Distribute:
    """Every ``num_workers``-th item, starting with ``rank``."""

    def __init__(self, sampler: Any, num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: expected at least 1")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank={rank}: expected 0 to {num_workers - 1}")
        self._sampler = sampler
        self._size = num_workers
        self._rank = rank

    def __len__(self) -> int:
        whole = len(self._sampler)
        return whole // self._size + (whole % self._size > self._rank)

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._sampler):
            if number % self._size == self._rank:
                yield item


class _Skip:
    """Items after the first ``skip`` ones. The length is that of the whole sampler."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._sampler)
        for _ in range(self._skip):
            if next(items, items) is items:  # cannot be an item of itself
                return
        yield from items


class _Shuffle:
    """Items in an order drawn from one numpy RandomState(seed) for all passes."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._rng = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        items = list(self._sampler)
        for i in self._rng.permutation(len(items)):
            yield items[i]


class RepeatSampler(_Repeat, Sampler[Any]):
    """Endless passes over a sampler."""


class RepeatBatchSampler(_Repeat, BatchSampler):
    """Endless passes over a batch sampler."""


class DistributedSampler(_Distribute, Sampler[Any]):
    """Share of one rank: items ``rank``, ``rank + num_workers``, ….

    Raises:
        ValueError: If ``num_workers`` is below 1, or ``rank`` is out of range.
    """


class DistributedBatchSampler(_Distribute, BatchSampler):
    """Share of one rank: batches ``rank``, ``rank + num_workers``, …."""


class SkipSampler(_Skip, Sampler[Any]):
    """A sampler without its first items."""


class SkipBatchSampler(_Skip, BatchSampler):
    """A batch sampler without its first batches."""


class ReproducibleShuffleSampler(_Shuffle, Sampler[Any]):
    """Items of a sampler, shuffled by a seed."""


class ReproducibleShuffleBatchSampler(_Shuffle, BatchSampler):
    """Batches of a batch sampler, shuffled by a seed."""
