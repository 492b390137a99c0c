"""A DataLoader whose position is part of a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from det_core._notices import print_notice
from det_core.core import _loader_state

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

T = TypeVar("T")
NOTICE_DELAY = 10.0
"""Seconds of loading done batches again after which that is announced."""


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
    model. A pass that is left by ``break`` goes on after a resume. Not part of the state are attributes that a dataset
    changes while it is read, and what a sampler draws from the global generators in the midst of a pass, if the script
    draws from them as well: give the sampler a generator.

    Args:
        loader: any number of workers, however they start; any dataset and sampler, with ``set_epoch(epoch)`` where it
            has one. Generators that its samplers, dataset, transforms or ``collate_fn`` hold are part of the state.
        skip_loading: pass over done batches in the sampler instead of loading them. Exact where only the sampler draws
            random numbers.

    Raises:
        ValueError: If ``skip_loading`` is set for an IterableDataset or for a loader with an ``__iter__()`` of its own,
            or if workers give batches in any order (``in_order=False``).
    """
    from torch.utils import data

    is_plain = type(loader).__iter__ is data.DataLoader.__iter__
    if skip_loading and (isinstance(loader.dataset, data.IterableDataset) or not is_plain):
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
        self._is_persistent = loader.persistent_workers and loader.num_workers > 0
        self._start: dict[str, Any] = {}
        self._done = 0
        self._is_over = True
        self._passes = 0
        self._loaded: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # asked for by copy and pickle before there is any
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        batches = self._resume(self._loaded) if self._loaded is not None else None
        self._loaded = None
        if batches is None:
            self._done = 0
            self._start = {**_loader_state.loader_state(self.loader), "workers": {}}
            with _loader_state.workers_reporting(self.loader, self._start["workers"]):
                batches = iter(self.loader)
        self._is_over = False
        self._passes += 1
        return self._count(batches, self._passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as ``torch.load(weights_only=True)`` reads it."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "epoch": self.epoch,
            "batches": self._done,
            "is_over": self._is_over,
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
        _loader_state.set_loader_state(self.loader, state["now"])

    def _resume(self, state: Mapping[str, Any]) -> Iterator[T] | None:
        """Return the rest of the pass that was under way, or None where its end was reached."""
        if state["is_over"] and not (self._is_persistent and state["start"]):
            return None
        after = state["now"]
        if state["is_over"]:
            after = _loader_state.loader_state(self.loader)
        else:
            _loader_state.check_epoch(self.loader, state["start"])
        self._start = state["start"]
        self._done = state["batches"]
        _loader_state.set_loader_state(self.loader, self._start)
        # At the end of a pass, only workers that stay remember what was loaded.
        is_last = self._done == state["loader"]["length"] and not self._is_persistent
        batches = self._go_through(skip=self._skip_loading or is_last)
        if state["is_over"]:
            next(batches, None)
        _loader_state.set_loader_state(self.loader, after)
        return None if state["is_over"] else batches

    def _go_through(self, *, skip: bool) -> Iterator[T]:
        """Begin the pass again, and return what comes after its done batches."""
        kind = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        order = _SkippingOrder(getattr(self.loader, kind), self._done)
        parts: dict[str, Any] = {kind: order} if skip else {}
        if workers := self._start["workers"]:
            parts |= _loader_state.workers_resumed(self.loader, workers)
        with _loader_state.replaced(self.loader, **parts):
            batches: Iterator[T] = iter(self.loader)
        if skip:
            order.skip()
        done = order.skipped  # 0 also where a loader with an __iter__() of its own begins later
        announce_at = time.monotonic() + NOTICE_DELAY
        for _ in islice(batches, self._done - done):
            done += 1
            if time.monotonic() > announce_at:
                announce_at = math.inf
                print_notice(
                    f"loading {self._done:,} batches again that were done before the checkpoint: {done:,} so far"
                )
        if done < self._done:
            raise RuntimeError(
                f"cannot resume the DataLoader: it gave {done} batches, and {self._done} before; is it the same data?"
            )
        return batches

    def _count(self, batches: Iterator[T], number: int) -> Iterator[T]:
        done = self._done
        for batch in batches:
            self._check_alone(number)
            self._done += 1
            yield batch
        self._check_alone(number)
        if 0 < done == self._done:
            print_notice(
                f"the checkpoint was saved after the last batch of epoch {self.epoch}, so none is left in it; begin "
                "the loop over epochs with the epoch of the resumable loader"
            )
        self._is_over = True
        self.epoch += 1

    def _check_alone(self, number: int) -> None:
        if number != self._passes:
            raise RuntimeError(
                "a resumable DataLoader was iterated again within an iteration: expected one at a time, as one "
                "position is saved; give the inner loop a DataLoader of its own"
            )


class _SkippingOrder:
    """An order of indices without its first ones."""

    def __init__(self, indices: Any, count: int) -> None:
        self._indices = indices
        self._count = count
        self._iterator: Iterator[Any] = iter(())
        self.skipped = 0

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._indices)
        return self

    def __len__(self) -> int:
        return len(self._indices)

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Pass over them now, where the loader draws its first index later."""
        for _ in islice(self._iterator, self._count - self.skipped):
            self.skipped += 1
