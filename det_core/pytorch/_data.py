"""Data loaders of trials: torch loaders for one rank and one position, made when training begins."""

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
"""Type of a batch: tensors in nested lists, tuples and dictionaries."""


class DataLoader:
    """A dataset with the arguments of a ``torch.utils.data.DataLoader``.

    The torch loader is made when training begins, once this rank's share and the position are known. With
    ``shuffle=True`` and without your own sampler, the order of a pass is a function of the trial's seed and the number
    of the pass, so a resume continues with the next batch.

    Args:
        dataset: a map-style dataset.
        batch_size: number of records in a batch of one rank.
        shuffle: shuffle in every pass.
        sampler: indices in your own order; excludes ``shuffle``.
        batch_sampler: batches of indices; excludes ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``.
        num_workers: number of worker processes; 0 loads in this process. Random numbers are seeded for each batch, so
            a batch does not depend on the worker that makes it.
        collate_fn: function that makes a batch from a list of samples.
        pin_memory: copy batches to pinned memory.
        drop_last: drop a smaller last batch.
        timeout: maximum wait for a worker in seconds; 0 waits without limit.
        worker_init_fn: function called in each worker with its number.
        multiprocessing_context: start method of workers.
        generator: source of random numbers for ``sampler``; with ``shuffle=True``, its seed replaces the trial's.
        prefetch_factor: number of batches that each worker loads in advance. Defaults to 2.
        persistent_workers: keep the workers between validations.

    Raises:
        ValueError: If arguments contradict each other, or for an IterableDataset.
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
                "an IterableDataset cannot be sharded and skipped: use your own torch DataLoader, and call "
                "context.experimental.disable_dataset_reproducibility_checks()"
            )
        if batch_size is None and batch_sampler is None:
            raise ValueError("batch_size=None needs a batch_sampler")
        if prefetch_factor is not None and prefetch_factor != 2 and not num_workers:
            raise ValueError(f"prefetch_factor={prefetch_factor} needs num_workers above 0")
        if persistent_workers and not num_workers:
            raise ValueError("persistent_workers needs num_workers above 0")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._generator = generator
        self._shuffle = shuffle and sampler is None and batch_sampler is None
        batching: dict[str, Any] = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
        if batch_sampler is not None:
            if batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
            batching = {"batch_sampler": batch_sampler}
        prefetch = None
        if num_workers:
            prefetch = prefetch_factor or 2
        shuffle = shuffle and len(dataset) > 0  # torch raises here; the trainer reports it with the loader's name
        # Checks the other arguments, and keeps those that do not concern the order.
        # Never iterated itself.
        self._parts = torch.utils.data.DataLoader(
            dataset, shuffle=shuffle, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory,
            timeout=timeout, worker_init_fn=worker_init_fn, multiprocessing_context=multiprocessing_context,
            generator=generator, prefetch_factor=prefetch, persistent_workers=persistent_workers, **batching,
        )  # fmt: skip
        self.batch_sampler: Any = self._parts.batch_sampler
        self.batches_by_user = batch_sampler is not None
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the whole dataset once."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        """Return the number of batches in a pass over the whole dataset."""
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the torch loader, such as ``sampler`` or ``collate_fn``."""
        if name.startswith("_"):  # before __init__, as in pickling, there is no _parts
            raise AttributeError(name)
        return getattr(self._parts, name)

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """Return a torch loader for the share of one rank.

        Args:
            repeat: repeat passes without end.
            skip: number of batches of this rank to skip.
            num_replicas: number of ranks that share the batches.
            rank: this rank, which takes batches ``rank``, ``rank + num_replicas``, ….
        """
        order = adapt_batch_sampler(self.batch_sampler, repeat=repeat, skip=skip, num_replicas=num_replicas, rank=rank)
        loader = rebuilt(self._parts, order, self.dataset)
        loader.generator = self._generator  # gives workers new seeds in each pass, as torch does
        return loader

    def training(self, seed: int, *, rank: int, size: int, skip: int) -> torch.utils.data.DataLoader[Any]:
        """Return the endless loader of one rank, from its batch ``skip`` on."""
        batches = self._batches(seed)
        order = NumberedBatches(batches, rank=rank, size=size, skip=skip, numbered=self.num_workers > 0)
        return rebuilt(self._parts, order, self._seeded_dataset(seed))

    def validation(self, seed: int, *, rank: int, size: int) -> torch.utils.data.DataLoader[Any]:
        """Return the loader of one rank for validation, with the same order in every pass."""
        batches = self._batches(seed)
        order = EpochOrder(batches, rank=rank, size=size, even=False, numbered=self.num_workers > 0)
        return rebuilt(self._parts, order, self._seeded_dataset(seed))

    def _seeded_dataset(self, seed: int) -> Any:
        """Return the dataset, with seeds for each batch if workers load it."""
        if self.num_workers:
            return SeededDataset(self.dataset, seed)
        return self.dataset

    def _batches(self, seed: int) -> Any:
        """Return the batch sampler of a pass, seeded if ``shuffle`` is set."""
        if not self._shuffle:
            return self.batch_sampler
        if self._generator is not None:
            seed = self._generator.initial_seed()
        assert self.batch_size is not None
        return BatchSampler(SeededShuffle(len(self.dataset), seed), self.batch_size, self.drop_last)


def adapt_batch_sampler(
    batch_sampler: Any, *, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Any:
    """Repeat a batch sampler, then shard it, then skip batches, in this order.

    Args:
        batch_sampler: sampler of batches of indices.
        repeat: repeat passes without end; the length stays that of one pass.
        skip: number of batches of this rank to skip.
        num_replicas, rank: number of ranks that share the batches, and this rank.
    """
    if repeat:
        batch_sampler = samplers.RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = samplers.DistributedBatchSampler(batch_sampler, num_replicas, rank)
    if skip > 0:
        batch_sampler = samplers.SkipBatchSampler(batch_sampler, skip)
    return batch_sampler


def data_length(data: Any) -> int:
    """Return the number of records in a batch: its length, or that of its first element.

    Raises:
        ValueError: If the container is empty.
        TypeError: If the type has no known length.
    """
    if isinstance(data, torch.Tensor) or (hasattr(data, "dtype") and hasattr(data, "shape")):
        return len(data)
    if isinstance(data, Mapping | Sequence) and not isinstance(data, str | bytes):
        if not data:
            raise ValueError("an empty batch has no length")
        if isinstance(data, Mapping):
            return len(next(iter(data.values())))
        return len(data[0])
    raise TypeError(f"unknown length of a batch of type {type(data).__name__}: override get_batch_length()")
