"""A DataLoader whose position is part of a checkpoint."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from det_core._notices import print_notice
from det_core.core import _loader_state

T = TypeVar("T")
NOTICE_DELAY = 10.0
"""Seconds of loading done batches again after which that is announced."""
_END = object()


def resumable(loader: DataLoader[T], *, skip_loading: bool = False) -> ResumableLoader[T]:
    """Give a DataLoader a position that a checkpoint can hold; its batches stay what they are without it.

    A resume begins the pass that was under way with the random states it began with, loads its done batches again and
    drops them, and sets the random states of the checkpoint. So augmentation in workers comes out equal, too::

        loader = core.resumable(DataLoader(dataset, 32, shuffle=True, num_workers=2))
        if path is not None:
            loader.load_state_dict(torch.load(path / "state.pt", weights_only=True)["loader"])
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                ...

    The state is of one rank, and ``load_state_dict()`` comes after what else draws random numbers, such as making the
    model. A pass that is left by ``break`` goes on after a resume. Persistent workers are seeded at each pass after the
    first. Not part of the state are attributes that a dataset changes while it is read, its generators in persistent
    workers, and what a sampler draws from the global generators in the midst of a pass, if the script draws from them
    as well: give the sampler a generator.

    Args:
        loader: any number of workers, however they start; any dataset and sampler. Where the sampler has
            ``set_epoch(epoch)``, the script calls it before each pass, as it does without this.
            Generators that its samplers, dataset, transforms or ``collate_fn`` hold are part of the state.
        skip_loading: pass over done batches in the sampler instead of loading them. Exact where only the sampler draws
            random numbers.

    Raises:
        ValueError: If ``skip_loading`` is set for an IterableDataset or for a loader with an ``__iter__()`` of its own,
            or if workers give batches in any order (``in_order=False``).
    """
    if skip_loading and (isinstance(loader.dataset, IterableDataset) or not _has_plain_iterator(loader)):
        raise ValueError("skip_loading=True: expected a map-style dataset, and a loader that inherits __iter__()")
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ValueError("in_order=False: expected True; without an order it is not known which batches are done")
    return ResumableLoader(loader, skip_loading)


class ResumableLoader(Generic[T]):
    """A DataLoader with a position, made by :func:`resumable`; it has the attributes of the DataLoader.

    Attributes:
        loader: the DataLoader.
        epoch: number of passes that have ended, which is the number of the one under way, or of the next one.
    """

    def __init__(self, loader: DataLoader[T], skip_loading: bool) -> None:
        self.loader = loader
        self.epoch = 0
        self._skip_loading = skip_loading
        self._seed = torch.initial_seed()
        self._is_persistent = loader.persistent_workers and loader.num_workers > 0 and _has_plain_iterator(loader)
        self._order = _Order(loader)
        self._start: dict[str, Any] = {}
        self._passes = 0
        self._done = 0
        self._is_over = True
        self._loaded: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # asked for by copy and pickle before there is any
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        if self._loaded is not None and not self._loaded["is_over"]:
            batches = self._resume(self._loaded)
        else:
            self._passes += 1
            self._done = 0
            self._start = _loader_state.loader_state(self.loader)
            batches = self._open()
        self._loaded = None
        self._is_over = False
        return self._count(batches, self._passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as ``torch.load(weights_only=True)`` reads it."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "epoch": self.epoch,
            "passes": self._passes,
            "batches": self._done,
            "is_over": self._is_over,
            "seed": self._seed,
            "start": self._start,
            "now": _loader_state.loader_state(self.loader),
            "loader": _loader_state.describe(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position that the next iteration goes on from, and the random states of that moment.

        Raises:
            ValueError: If this loader differs from that of the state in length, batch size, samplers, rank or workers.
        """
        here = _loader_state.describe(self.loader)
        differing = [f"{name}={value!r}, here {here[name]!r}" for name, value in state["loader"].items()
                     if value != here[name]]  # fmt: skip
        if differing:
            raise ValueError(
                f"cannot resume the DataLoader: its state is of one with {'; '.join(differing)}. Make it as it was, or "
                "do not load its state: the pass then starts from its beginning"
            )
        self._loaded = state
        self.epoch = state["epoch"]
        self._passes = state["passes"]
        self._seed = state["seed"]
        _loader_state.set_loader_state(self.loader, state["now"])

    def _resume(self, state: Mapping[str, Any]) -> Iterator[T]:
        """Return the rest of the pass that was under way."""
        _loader_state.check_epoch(self.loader, state["now"])
        self._start = state["start"]
        self._done = state["batches"]
        _loader_state.set_loader_state(self.loader, self._start)
        # Of a pass without a batch left, only the sampler's end may still draw random numbers.
        is_last = self._done == state["loader"]["length"] and _has_plain_iterator(self.loader)
        if self._skip_loading or is_last:
            batches = self._open(skip=self._done)
        else:
            batches = self._open()
            self._load_done(batches)
        _loader_state.set_loader_state(self.loader, state["now"])
        return batches

    def _open(self, *, skip: int = 0) -> Iterator[T]:
        """Begin a pass with the random states of now, without its first batches."""
        parts: dict[str, Any] = {self._order.name: self._order} if self._is_persistent or skip else {}
        self._order.skip = skip
        self._order.seeds = iter(())
        if self._is_persistent and self._passes > 1:
            seed = random.Random(f"{self._seed} {self._passes}").getrandbits(62)
            self._order.seeds = iter(range(seed, seed + self.loader.num_workers))
            # Workers that stay draw no seed from the generators of the script, so new ones in their place must not.
            parts["generator"] = torch.Generator()
        with _loader_state.replaced(self.loader, **parts):
            batches: Iterator[T] = iter(self.loader)
        self._order.pass_over()  # without workers nothing has been drawn from the order yet
        return batches

    def _load_done(self, batches: Iterator[T]) -> None:
        """Load the batches again that are done, and drop them."""
        announce_at = time.monotonic() + NOTICE_DELAY
        for done in range(self._done):
            if next(batches, _END) is _END:
                raise RuntimeError(
                    f"cannot resume the DataLoader: it gave {done} batches, and {self._done} before; is it the same "
                    "data?"
                )
            if time.monotonic() > announce_at:
                announce_at = math.inf
                print_notice(
                    f"loading {self._done:,} batches again that were done before the checkpoint: {done + 1:,} so far"
                )

    def _count(self, batches: Iterator[T], number: int) -> Iterator[T]:
        for batch in batches:
            self._check_alone(number)
            self._done += 1
            yield batch
        self._check_alone(number)
        self._is_over = True
        self.epoch += 1

    def _check_alone(self, number: int) -> None:
        if number != self._passes:
            raise RuntimeError(
                "a resumable DataLoader was iterated again within an iteration: expected one at a time, as one "
                "position is saved; give the inner loop a DataLoader of its own"
            )


def _has_plain_iterator(loader: DataLoader[Any]) -> bool:
    """Return whether an iterator of the loader begins with its order when it is made, as torch's own does."""
    return type(loader).__iter__ is DataLoader.__iter__


class _Order:
    """Order of a loader's sampler, for an iterator of the loader; persistent workers have one through all passes.

    Attributes:
        name: the attribute of the loader that holds the order.
        skip: indices of the pass to pass over.
        seeds: those of the workers that are to be seeded in this pass, in turn.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.skip = 0
        self.seeds: Iterator[int] = iter(())
        self._indices: Any = getattr(loader, self.name)
        self._rest: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        self._rest = iter(self._indices)
        return self

    def __next__(self) -> Any:
        self.pass_over()
        indices = next(self._rest)
        seed = next(self.seeds, None)  # torch gives the first indices of a pass to one worker after the other
        return indices if seed is None else _Seeding(seed, indices)

    def pass_over(self) -> None:
        """Drop what is to be passed over."""
        for _ in islice(self._rest, self.skip):
            pass
        self.skip = 0


class _Seeding:
    """Indices that seed the generators of the worker they are sent to."""

    def __init__(self, seed: int, indices: Any) -> None:
        self._arguments = (seed, indices)

    def __reduce__(self) -> Any:
        return _seed_worker, self._arguments


def _seed_worker(seed: int, indices: Any) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    return indices
