"""A trial's data: the loader's arguments, and how a torch loader is made of them for one rank and one position."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from det_core._training.data_order import (
    EpochOrder,
    NumberedBatches,
    Position,
    SeededDataset,
    SeededShuffle,
    rebuilt,
)
from det_core._training.devices import to_device
from det_core.errors import InvalidExperimentException
from det_core.pytorch import samplers

if TYPE_CHECKING:
    from det_core.pytorch._trial import Trial
    from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")
TorchData = Any
"""A batch: tensors, in lists, tuples and dictionaries of any depth."""

__all__ = ["DataLoader", "Dealing", "Loaders", "TorchData", "adapt_batch_sampler", "data_length", "to_device"]


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


@dataclass(frozen=True)
class Dealing:
    """How batches are dealt out to ranks in one fit, so that a number of trained batches is a place in the data.

    Attributes:
        pass_batches: batches of a pass over the dataset.
        batch_size: records in each; None: it is up to a batch_sampler of the user's.
        skip: batches of each rank that were passed over.
        origin: how many were trained by then.
    """

    pass_batches: int
    batch_size: int | None
    skip: int
    origin: int


class Loaders:
    """The loaders of one fit.

    Args:
        trial: builds them.
        context: says whether loaders that are not ours are accepted.
        rank: whose share of the batches to take; left out: that of this rank among all.
        size: how many share them.
        each: how many batches of the training loader are trained as one.

    Attributes:
        dealing: how batches are dealt out; None: nothing is built, or a loader of the user's.
    """

    def __init__(
        self, trial: Trial, context: TrialContext, *, rank: int | None = None, size: int | None = None, each: int = 1
    ) -> None:
        self._trial, self._context, self._each = trial, context, each
        self._rank = context.distributed.rank if rank is None else rank
        self._size = context.distributed.size if size is None else size
        self._validation: Any = None
        self.dealing: Dealing | None = None

    def build(self, position: Position, *, full_validation: bool) -> tuple[Iterator[Any], int | None]:
        """Build both loaders; the training batches from ``position`` on, and how many of them are a pass of a rank."""
        training = self._trial.build_training_data_loader()
        self._check(training, "build_training_data_loader")
        training = _unrepeated(training)
        if isinstance(training, DataLoader):
            slot = None if training.batches_by_user else training.batch_size
            whole = _length(training)
            skip = self._start(position, whole, slot, _length(training.dataset))
            self.dealing = None if whole is None else Dealing(whole, slot, skip, position.batches)
            loader = training.training(position.seed, rank=self._rank, size=self._size, skip=skip)
            batches, length = iter(loader), _length(loader)
        else:
            if position.batches:
                logger.warning("a loader of your own starts from its beginning: this resume is not exact")
            batches, length = _endless(training), _length(training)
        validation = self._trial.build_validation_data_loader()
        self._check(validation, "build_validation_data_loader")
        validation = _unrepeated(validation)
        if isinstance(validation, DataLoader):
            size, rank = (1, 0) if full_validation else (self._size, self._rank)
            validation = validation.validation(position.seed, rank=rank, size=size)
        self._validation = validation
        return batches, length

    def validation(self) -> tuple[Iterator[Any], int | None]:
        """A new pass over this rank's share of the validation set."""
        return iter(self._validation), _length(self._validation)

    def whole_validation(self) -> Any:
        """The torch loader of the whole validation set."""
        return self._validation

    def position(self, start: Position, batches_trained: int) -> Position:
        """Where the data is after so many batches of this rank."""
        dealing = self.dealing
        if dealing is None:
            return Position(start.seed, batches_trained, 0, 0, None, self._size)
        dealt = ((batches_trained - dealing.origin) * self._each + dealing.skip) * self._size
        pass_, batch = divmod(dealt, dealing.pass_batches)
        slot = dealing.batch_size
        records, together = (0, None) if slot is None else (batch * slot, slot * self._each * self._size)
        return Position(start.seed, batches_trained, pass_, records, together, self._size)

    def _start(self, position: Position, pass_batches: int | None, slot: int | None, dataset: int | None) -> int:
        """How many batches of this rank to pass over: those that the ranks of before have dealt out, in records."""
        each = self._each
        if slot is None or position.global_batch_size is None or pass_batches is None:
            if position.size != self._size and position.batches:
                logger.warning(
                    "%d rank(s) go on where %d were: with a batch_sampler of your own, or a checkpoint of another "
                    "kind, this resume is not exact", self._size, position.size,
                )  # fmt: skip
            return position.batches * each
        dealt = position.pass_ * pass_batches + math.ceil(position.records / slot)
        skip = math.ceil(dealt / (self._size * each)) * each
        together = slot * each * self._size
        if (position.size, position.global_batch_size) != (self._size, together) and (
            position.global_batch_size != together or dataset is None or dataset % together
        ):
            pass_, batch = divmod(skip * self._size, pass_batches)
            logger.warning(
                "%d rank(s) with %d records a step go on where %d rank(s) with %d were: the training goes on at record "
                "%d of pass %d, and was at record %d of pass %d",
                self._size, together, position.size, position.global_batch_size, batch * slot, pass_,
                position.records, position.pass_,
            )  # fmt: skip
        return skip

    def _check(self, loader: Any, method: str) -> None:
        if not isinstance(loader, DataLoader) and not self._context._any_loader:
            raise InvalidExperimentException(
                f"{method}() returned a {type(loader).__name__}: expected a det_core.pytorch.DataLoader; to use any "
                f"other, call {self._context._any_loader_call} in __init__()"
            )


def _endless(loader: Any) -> Iterator[Any]:
    """Pass after pass.

    Raises:
        RuntimeError: a pass without a batch.
    """
    for number in count():
        given = False
        for batch in loader:
            given = True
            yield batch
        if not given:
            spent = f" in pass {number + 1}: it can be gone through once only, as a generator can" if number else ""
            raise RuntimeError(f"the training loader gives no batch{spent}")


def _unrepeated(loader: Any) -> Any:
    """What DeepSpeed's RepeatingLoader repeats: that has a length and an end, and passes are repeated here."""
    return loader.loader if type(loader).__name__ == "RepeatingLoader" and hasattr(loader, "loader") else loader


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
