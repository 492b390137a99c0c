"""Samplers and batch samplers that repeat, deal out to ranks, skip, and shuffle in an order that can be made again.

Put together in the order repeat, distribute, skip, they are what ``det_core.pytorch.DataLoader`` uses; they are public
for those who build a loader of their own.
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
    """Pass after pass, without end. Its length is that of one pass."""

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
                raise RuntimeError("the training loader gives no batch: its dataset is empty, or smaller than a batch")


class _Distribute:
    """Every ``num_workers``-th item from the ``rank``-th on."""

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
    """Without the first ``skip`` items, once for all passes. Its length is that of the whole."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._sampler)
        for _ in range(self._skip):
            if next(items, items) is items:
                return
        yield from items


class _Shuffle:
    """In an order by numpy's RandomState(seed), which goes on from pass to pass."""

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
    """A sampler that never ends: pass after pass of another."""


class RepeatBatchSampler(_Repeat, BatchSampler):
    """A batch sampler that never ends: pass after pass of another."""


class DistributedSampler(_Distribute, Sampler[Any]):
    """One rank's share of a sampler: items ``rank``, ``rank + num_workers``, ….

    Raises:
        ValueError: ``num_workers`` below 1, or a rank that is not among them.
    """


class DistributedBatchSampler(_Distribute, BatchSampler):
    """One rank's share of a batch sampler, as :class:`DistributedSampler`."""


class SkipSampler(_Skip, Sampler[Any]):
    """A sampler without its first items, once."""


class SkipBatchSampler(_Skip, BatchSampler):
    """A batch sampler without its first batches, once."""


class ReproducibleShuffleSampler(_Shuffle, Sampler[Any]):
    """The items of a sampler in a shuffled order that a seed makes again."""


class ReproducibleShuffleBatchSampler(_Shuffle, BatchSampler):
    """The batches of a batch sampler in a shuffled order that a seed makes again."""
