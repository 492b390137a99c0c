"""A loader's batches, epoch by epoch: in an order of (seed, epoch), this rank's share, from any batch on.

That makes the position of a training two numbers, and a resume in the middle of an epoch exact.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from det_core._env import Environment
from det_core._training.data_order import EpochOrder, SeededDataset, length_of, rebuilt, repeat_first, share
from det_core._training.devices import mover
from det_core._training.loader_errors import forget_workers
from det_core.accelerated.utils import epoch_seed

logger = logging.getLogger("det_core.accelerated")


class EpochGenerator(torch.Generator):
    """Takes the place of a sampler's own generator, which is left as it was; a sampler may keep it for later runs.

    Attributes:
        own_seed: the seed of the one in whose place it is; None, if there was none.
    """

    own_seed: int | None = None


class EpochLoader:
    """Loader that the Trainer iterates over in place of a user's loader, with the attributes of that one.

    A torch ``DataLoader`` of a map-style dataset is rebuilt around an :class:`EpochOrder`. Anything else is iterated
    as it is: every rank draws all of its batches and takes its share, and a resume in the middle of an epoch passes
    over batches. Workers of an iterable dataset are started anew in each epoch, with seeds from its number. Of a loader
    that ``core.resumable()`` made, the position is unused: it takes the DataLoader inside. It also has what
    accelerate's loaders have, which tell ``gather_for_metrics()`` how many samples of the last batches are
    there for the second time.

    Args:
        loader: the user's.
        seed: what the order of shuffled epochs comes from.
        rank, size: which of the ranks this is.
        even: as in :class:`EpochOrder`.
        device: where batches go.
        shared: accelerate's ``GradientState``, updated when batches are drawn; None without one.

    Attributes:
        end_of_dataloader: whether the last batch was given.
        total_batch_size, total_dataset_length: samples in a batch of all ranks, and in the dataset; None: not known.
        remainder: the samples in the last batches of all ranks, each counted once; 0: these are whole, or not known.
    """

    _is_det_core = True

    def __init__(
        self, loader: Any, *, seed: int, rank: int, size: int, even: bool, device: torch.device, shared: Any = None
    ) -> None:
        if _is_resumable(loader):
            # Nobody would save its position, and its order hangs on the global generators, not on seed and epoch.
            loader = loader.loader
        self.loader = loader
        self.device = device
        self._shared = shared
        self.end_of_dataloader = False
        self.total_dataset_length = length_of(getattr(loader, "dataset", None))
        width = batch_size_of(loader)
        self.total_batch_size = None if width is None else width * size
        is_cut = getattr(loader, "drop_last", False) or not (self.total_dataset_length and self.total_batch_size)
        self.remainder = 0 if is_cut else self.total_dataset_length % self.total_batch_size  # type: ignore[operator]
        self._seed = seed
        self._even = even
        self._epoch = self._first = 0
        sampler = _sampler(loader)
        if isinstance(sampler, DistributedSampler):
            # the user has shared it out
            rank = 0
            size = 1
        self._rank = rank
        self._size = size
        self._sampler = sampler
        self._generator: EpochGenerator | None = None
        self._order: EpochOrder | None = None
        if not isinstance(loader, DataLoader):
            return
        is_iterable = isinstance(loader.dataset, IterableDataset)
        owner = loader if is_iterable else sampler  # that of a loader gives its workers their seeds
        if hasattr(owner, "generator"):
            if not isinstance(owner.generator, EpochGenerator):
                generator = EpochGenerator()
                generator.own_seed = None if owner.generator is None else owner.generator.initial_seed()
                owner.generator = generator
            self._generator = owner.generator
            self._seed = seed if self._generator.own_seed is None else self._generator.own_seed
        if is_iterable:
            return
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        numbered = loader.num_workers > 0 and loader.batch_sampler is not None
        self._order = EpochOrder(batches, rank=rank, size=size, even=even, numbered=numbered)
        dataset = SeededDataset(loader.dataset, self._seed) if numbered else loader.dataset
        self._rebuilt = rebuilt(loader, self._order, dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # asked for by pickle and copy before there is any
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the user's loader, so that ``isinstance(loader, DataLoader)`` holds."""
        return type(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as on accelerate's loaders."""
        self.begin(epoch)

    def __len__(self) -> int:
        if self._order is not None:
            return len(self._order)
        return share(len(self.loader), self._rank, self._size, self._even)

    def reseed(self, seed: int) -> None:
        """Order epochs by another seed, unless the loader's own generator gives it."""
        if self._generator is None or self._generator.own_seed is None:
            self._seed = seed
            if self._order is not None and isinstance(self._rebuilt.dataset, SeededDataset):
                self._rebuilt.dataset.order_seed = seed

    @property
    def iterated(self) -> Any:
        """The loader that batches are from: the user's, or the one that was rebuilt from it."""
        if self._order is None:
            return self.loader
        return self._rebuilt

    def begin(self, epoch: int, first: int = 0) -> None:
        """Say which epoch the next iteration is of, counted from 0, and with which batch of this rank it begins."""
        self._epoch = epoch
        self._first = first
        known = isinstance(self._sampler, SequentialSampler) or hasattr(self._sampler, "set_epoch")
        may_draw_here = self._order is None and not getattr(self.loader, "num_workers", 0)
        if first and (may_draw_here or not (known or self._generator is not None)):
            logger.warning(
                "this training goes on in the middle of an epoch whose order is not known to be that of before: for an "
                "exact resume use shuffle=True, a sampler with a generator= or a set_epoch(), or workers for an "
                "iterable dataset"
            )

    def __iter__(self) -> Iterator[Any]:
        if self._generator is not None:
            self._generator.manual_seed(epoch_seed(self._seed, self._epoch))
        for part in (self._sampler, getattr(self.loader, "batch_sampler", None), getattr(self.loader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self._epoch)
        if self._order is not None:
            self._order.epoch = self._epoch
            self._order.first = self._first
            batches: Iterator[Any] = iter(self._rebuilt)
        else:
            if self._generator is not None:
                forget_workers(self.loader)  # those that stay would go on with the random states of the epoch before
            stream = repeat_first(self.loader, self._size) if self._even else iter(self.loader)
            # passed over now, as that draws random numbers: those of the batches to come are put back after it
            deque(itertools.islice(stream, self._first * self._size), maxlen=0)
            batches = itertools.islice(stream, self._rank, None, self._size)
        self.end_of_dataloader = False
        return self._counted(batches if self.device.type == "cpu" else map(mover(self.device), batches))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count batches, and keep accelerate's state up to date until the last, as its own loaders do."""
        shared = self._shared
        length = length_of(self)
        if shared is not None:
            shared._remove_dataloader(self)  # of an epoch that was left
            shared._add_dataloader(self)
        for given, batch in enumerate(batches, self._first + 1):
            if given == length:
                self.end_of_dataloader = True
            yield batch
        if shared is not None:
            shared._remove_dataloader(self)


def _is_resumable(loader: Any) -> bool:
    """Return whether ``core.resumable()`` made a loader. A script without the core imports nothing of it."""
    module = sys.modules.get("det_core.core._resumable")
    return module is not None and isinstance(loader, module.ResumableLoader)


def _sampler(loader: Any) -> Any:
    """Return the sampler of a loader, or of its own batch_sampler."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def default_workers() -> int:
    """Return the worker processes of a loader: this rank's share of the processors of the process, at least 1."""
    local = int(Environment.read().launch.get("LOCAL_WORLD_SIZE", 1))
    return max(len(os.sched_getaffinity(0)) // local, 1)


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches, or None if unknown."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int):  # of a user-defined loader, an attribute of this name may be anything
        return size
    return None


def begin(loader: Any, epoch: int, first: int = 0) -> None:
    """Tell a loader of the Trainer's which epoch is next and with which of its batches it begins; loaders of others may
    call something else so."""
    if getattr(loader, "_is_det_core", False):
        loader.begin(epoch, first)


def reseed(loader: Any, seed: int) -> None:
    """Have a loader of the Trainer's order its epochs by another seed."""
    if getattr(loader, "_is_det_core", False):
        loader.reseed(seed)


def whole_length(loader: Any) -> int | None:
    """Return the number of batches of all ranks together; of a user-defined loader, that of this rank."""
    if getattr(loader, "_is_det_core", False):
        loader = loader.loader
    return length_of(loader)
