"""A trial's data: the loader's arguments, and how a torch loader is made of them for one rank and one position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from det_core._training.data_order import (
    EpochOrder,
    NumberedBatches,
    SeededDataset,
    SeededShuffle,
    rebuilt,
)
from det_core.pytorch import samplers

TorchData = Any
"""A batch: tensors, in lists, tuples and dictionaries of any depth."""


class DataLoader:
    """A dataset with the arguments of a ``torch.utils.data.DataLoader``, which is made when training begins.

    Only then is it known which share of the batches this rank takes, and where the training goes on. With
    ``shuffle=True`` and no sampler of your own, the order of a pass is a function of the trial's seed and the number
    of the pass, so that a resume goes on with the very batch that would have come.

    Args:
        dataset: a map-style dataset.
        batch_size: records in a batch of one rank.
        shuffle: shuffle anew in every pass.
        sampler: indices in an order of your own; not with ``shuffle``.
        batch_sampler: batches of indices; not with ``batch_size``, ``shuffle``, ``sampler`` or ``drop_last``.
        num_workers: processes that load data; 0: this one does. Their random numbers are seeded for each batch, so
            that a batch is the same whichever worker makes it.
        collate_fn: makes a batch of a list of samples.
        pin_memory: copy batches to pinned memory.
        drop_last: leave out a last batch that is smaller.
        timeout: seconds to wait for a worker; 0: for ever.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started.
        generator: draws for ``sampler``; with ``shuffle=True`` it gives the seed in place of the trial's.
        prefetch_factor: batches that each worker loads in advance.
        persistent_workers: keep the workers from one validation to the next.

    Raises:
        ValueError: arguments that contradict each other, as torch says, or an IterableDataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Sampler[Any] | None = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "an IterableDataset cannot be sharded and skipped into: use a torch DataLoader of your own, and call "
                "context.experimental.disable_dataset_reproducibility_checks()"
            )
        if batch_size is None and batch_sampler is None:
            raise ValueError("batch_size=None needs a batch_sampler")
        if prefetch_factor is not None and prefetch_factor != 2 and not num_workers:
            raise ValueError(f"prefetch_factor={prefetch_factor} needs num_workers above 0")
        if persistent_workers and not num_workers:
            raise ValueError("persistent_workers needs num_workers above 0")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._generator = generator
        self._shuffle = shuffle and sampler is None and batch_sampler is None
        chosen = {"batch_sampler": batch_sampler} if batch_sampler is not None else {"sampler": sampler}
        sizes = {} if batch_sampler is not None else {"batch_size": batch_size, "drop_last": drop_last}
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler goes without batch_size, shuffle, sampler and drop_last")
        shuffle = shuffle and len(dataset) > 0  # an empty one is told of when training begins
        # torch's own loader checks the rest, and keeps all that is no matter of order.
        self._parts = torch.utils.data.DataLoader(
            dataset, shuffle=shuffle, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory,
            timeout=timeout, worker_init_fn=worker_init_fn, multiprocessing_context=multiprocessing_context,
            generator=generator, prefetch_factor=(prefetch_factor or 2) if num_workers else None,
            persistent_workers=persistent_workers, **chosen, **sizes,
        )  # fmt: skip
        self.batch_sampler: Any = self._parts.batch_sampler
        self.batches_by_user = batch_sampler is not None
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[Any]:
        """One pass over the whole set."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        """How many batches a pass over the whole set has."""
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        """All else that torch's loader has: ``sampler``, ``collate_fn``, ``pin_memory``, …, to read."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._parts, name)

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """A torch loader of one rank's share.

        Args:
            repeat: pass after pass, without end.
            skip: batches of this rank to pass over.
            num_replicas: how many ranks share the batches.
            rank: which of them this is: it takes batches ``rank``, ``rank + num_replicas``, ….
        """
        order = adapt_batch_sampler(self.batch_sampler, repeat=repeat, skip=skip, num_replicas=num_replicas, rank=rank)
        loader = rebuilt(self._parts, order, self.dataset)
        loader.generator = self._generator  # workers get other seeds in each pass, as those of a loader of torch's
        return loader

    def training(self, seed: int, *, rank: int, size: int, skip: int) -> torch.utils.data.DataLoader[Any]:
        """The endless loader of one rank that goes on after ``skip`` batches, the same as if it had made them."""
        numbered = self.num_workers > 0
        order = NumberedBatches(self._batches(seed), rank=rank, size=size, skip=skip, numbered=numbered)
        return rebuilt(self._parts, order, SeededDataset(self.dataset, seed) if numbered else self.dataset)

    def validation(self, seed: int, *, rank: int, size: int) -> torch.utils.data.DataLoader[Any]:
        """One rank's share of the whole set, in the same order each time: validating draws nothing from the generators
        of this process, and what is resumed is validated as what was not."""
        numbered = self.num_workers > 0
        order = EpochOrder(self._batches(seed), rank=rank, size=size, even=False, numbered=numbered)
        return rebuilt(self._parts, order, SeededDataset(self.dataset, seed) if numbered else self.dataset)

    def _batches(self, seed: int) -> Any:
        """The batches of a pass, shuffled by a seed if ``shuffle`` was asked for."""
        if not self._shuffle:
            return self.batch_sampler
        seed = self._generator.initial_seed() if self._generator is not None else seed
        assert self.batch_size is not None
        return BatchSampler(SeededShuffle(len(self.dataset), seed), self.batch_size, self.drop_last)


def adapt_batch_sampler(
    batch_sampler: Any, *, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Any:
    """A batch sampler repeated, then dealt out to ranks, then skipped into, in this order.

    Args:
        batch_sampler: gives batches of indices.
        repeat: pass after pass, without end; its length stays that of one pass.
        skip: batches of this rank to pass over.
        num_replicas, rank: how many ranks share the batches, and which this is.
    """
    if repeat:
        batch_sampler = samplers.RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = samplers.DistributedBatchSampler(batch_sampler, num_replicas, rank)
    if skip > 0:
        batch_sampler = samplers.SkipBatchSampler(batch_sampler, skip)
    return batch_sampler


def data_length(data: Any) -> int:
    """How many records a batch has: its length, or that of the first thing in it.

    Raises:
        ValueError: an empty container.
        TypeError: another type.
    """
    if isinstance(data, torch.Tensor) or (hasattr(data, "dtype") and hasattr(data, "shape")):
        return len(data)
    if isinstance(data, Mapping | Sequence) and not isinstance(data, str | bytes):
        if not data:
            raise ValueError("an empty batch has no length")
        return len(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    raise TypeError(f"the length of a {type(data).__name__} is not known: override get_batch_length()")
