"""A DataLoader whose position is part of a checkpoint."""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from operator import length_hint
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from det_core._notices import print_notice
from det_core.core._random_state import random_state, set_random_state

T = TypeVar("T")
NOTICE_DELAY = 10.0
"""Seconds of loading done batches again after which that is announced."""
MAX_DEPTH = 8
"""Attributes and items from a loader to a generator that is part of its state."""
MAX_ITEMS = 100
"""Items of a container that is searched for generators; longer ones are data."""
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_OPAQUE = (type, ModuleType, random.SystemRandom)
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

    The state is of one rank; load it after all else that draws random numbers, such as making the model. A pass that is
    left by ``break`` goes on after a resume. Persistent workers are seeded anew at each pass after the first. Not part
    of the state are attributes that a dataset changes while it is read, its generators in persistent workers, and what
    a sampler draws from the global generators from batch to batch, if the script draws from them as well.

    Args:
        loader: any workers, dataset and sampler, whose ``set_epoch(epoch)`` the script calls as before. Generators that
            its samplers, dataset, transforms or ``collate_fn`` hold are part of the state.
        skip_loading: pass over done batches in the sampler instead of loading them. Exact where only the sampler draws
            random numbers.

    Raises:
        ValueError: If ``skip_loading`` is set for an IterableDataset; if it is set or workers persist in a loader with
            an ``__iter__()`` of its own; if workers give batches in any order (``in_order=False``).
    """
    return ResumableLoader(loader, skip_loading)


class ResumableLoader(Generic[T]):
    """A DataLoader with a position, made by :func:`resumable`; it has the attributes of the DataLoader.

    Attributes:
        loader: the DataLoader.
        epoch: number of passes that have ended, which is the number of the one under way, or of the next one.
    """

    def __init__(self, loader: DataLoader[T], skip_loading: bool) -> None:
        # torch's own iterator takes its sampler and workers when it is made; accelerate's, with its first batch.
        self._is_plain = type(loader).__iter__ is DataLoader.__iter__
        if skip_loading and isinstance(loader.dataset, IterableDataset):
            raise ValueError("skip_loading=True: expected a map-style dataset")
        if (skip_loading or loader.persistent_workers) and not self._is_plain:
            raise ValueError(
                "skip_loading=True or persistent_workers=True: expected a loader that inherits __iter__(), such as one "
                "that accelerate has not prepared"
            )
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise ValueError("in_order=False: expected True; without an order it is not known which batches are done")
        self.loader = loader
        self.epoch = 0
        self._skip_loading = skip_loading
        self._passes = 0
        self._done = 0
        self._start: dict[str, Any] | None = None  # of the pass under way
        self._loaded: dict[str, Any] | None = None  # random states of a checkpoint

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # asked for by copy and pickle before there is any
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        if self._loaded is not None and self._start is not None:
            batches = self._resume(self._start, self._loaded)
        else:
            self._passes += 1
            self._done = 0
            self._start = _random_states(self.loader)
            batches = self._open()
        self._loaded = None
        return self._count(batches, self._passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as ``torch.load(weights_only=True)`` reads it."""
        return {
            "epoch": self.epoch,
            "passes": self._passes,
            "batches": self._done,
            "start": self._start,
            "now": self._loaded or _random_states(self.loader),
            "loader": _describe(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position that the next iteration goes on from, and the random states of that moment.

        Raises:
            ValueError: If this loader differs from that of the state in length, batch size, samplers, rank or workers.
        """
        here = _describe(self.loader)
        differing = [f"{name}={value!r}, here {here[name]!r}" for name, value in state["loader"].items()
                     if value != here[name]]  # fmt: skip
        if differing:
            raise ValueError(
                f"cannot resume the DataLoader: its state is of one with {'; '.join(differing)}. Make it as it was, or "
                "do not load its state: the pass then starts from its beginning"
            )
        self.epoch = state["epoch"]
        self._passes = state["passes"]
        self._done = state["batches"]
        self._start = state["start"]
        self._loaded = state["now"]
        _set_random_states(self.loader, state["now"])

    def _resume(self, start: dict[str, Any], now: dict[str, Any]) -> Iterator[T]:
        """Return the rest of the pass that was under way."""
        sampler = self.loader.sampler
        epoch = start["numbers"][0].get("epoch")
        if isinstance(sampler, DistributedSampler) and sampler.epoch != epoch:  # others count epochs by themselves
            raise ValueError(
                f"set_epoch({sampler.epoch}): expected {epoch}, the epoch under way at the checkpoint; begin the loop "
                "with the epoch of the resumable loader"
            )
        self.loader._iterator = None  # persistent workers of this process are in another state
        _set_random_states(self.loader, start)
        # Of a pass without a batch left, only the sampler's end may still draw random numbers.
        if self._skip_loading or (self._is_plain and self._done == _describe(self.loader)["length"]):
            batches = self._open(skip=self._done)
        else:
            batches = self._open()
            self._load_done(batches)
        _set_random_states(self.loader, now)
        return batches

    def _open(self, *, skip: int = 0) -> Iterator[T]:
        """Begin a pass with the random states of now, without its first batches."""
        if not self._is_plain:
            return iter(self.loader)
        loader = copy.copy(self.loader)
        parts = vars(loader)  # torch does not let them be set
        if loader.persistent_workers and self._passes > 1:
            seed = random.Random(f"{torch.initial_seed()} {self._passes}").getrandbits(62)
            if loader._iterator is None:
                parts["worker_init_fn"] = partial(_seed_worker, seed, loader.worker_init_fn)
                # Workers that stay draw no seed from the script's generators, so new ones in their place must not.
                parts["generator"] = torch.Generator()
            else:
                # Sent to each worker before it begins the pass; torch sends a number by it to an IterDataPipe.
                loader._iterator._shared_seed = _Seed(seed)
        if not skip:
            batches: Iterator[T] = iter(loader)
            self.loader._iterator = loader._iterator  # persistent workers
            return batches
        name = "batch_sampler"
        if loader.batch_sampler is None:
            name = "sampler"
        indices = iter(parts[name])
        if loader.num_workers:
            parts[name] = islice(indices, skip, None)
            return iter(loader)  # draws a seed, then the first indices
        parts[name] = indices
        batches = iter(loader)  # draws a seed, and no indices yet
        deque(islice(indices, skip), maxlen=0)
        return batches

    def _load_done(self, batches: Iterator[T]) -> None:
        """Load the batches again that are done, and drop them."""
        notice_at = time.monotonic() + NOTICE_DELAY
        for done in range(self._done):
            if next(batches, _END) is _END:
                raise RuntimeError(
                    f"cannot resume the DataLoader: it gave {done} batches, and {self._done} before the checkpoint; "
                    "give it the same data"
                )
            if time.monotonic() > notice_at:
                print_notice(f"loading {self._done:,} batches again that were done before the checkpoint")
                notice_at = math.inf

    def _count(self, batches: Iterator[T], number: int) -> Iterator[T]:
        """Yield the batches of a pass, and count them."""
        for batch in batches:
            self._done += 1
            yield batch
            if number != self._passes:
                raise RuntimeError(
                    "a resumable DataLoader was iterated again within an iteration: expected one at a time, as one "
                    "position is saved; give the inner loop a DataLoader of its own"
                )
        self._start = None
        self.epoch += 1


class _Seed(int):
    """Seeds the generators of a worker when it arrives there."""

    def __reduce__(self) -> Any:
        return _seed_worker, (int(self),)


def _seed_worker(seed: int, worker_init_fn: Callable[[int], None] | None = None, worker: int = 0) -> None:
    """Seed the generators of a worker at the start of a pass; a new worker has its own initialization before."""
    if worker_init_fn is not None:
        worker_init_fn(worker)
    seed += get_worker_info().id
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _describe(loader: Any) -> dict[str, Any]:
    """Return the properties that two loaders share if a position in one is a position in the other."""
    indices = loader.batch_sampler
    if indices is None:
        indices = loader.sampler
    return {
        "length": length_hint(indices, -1),  # that of the loader has torch warn about an IterableDataset
        "records": length_hint(loader.dataset, -1),
        "samplers": [type(sampler).__name__ for sampler in _samplers(loader)],
        "batch_size": getattr(loader.batch_sampler, "batch_size", None),
        "rank": getattr(loader.sampler, "rank", None),
        "num_replicas": getattr(loader.sampler, "num_replicas", None),
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
    }


def _random_states(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of what a loader holds, and the numbers that its samplers keep."""
    numbers = [
        {key: value for key, value in getattr(sampler, "__dict__", {}).items() if type(value) is int}
        for sampler in _samplers(loader)
    ]
    generators = {path: _read(generator) for path, generator in _generators(loader).items()}
    return {"random": random_state(), "generators": generators, "numbers": numbers}


def _set_random_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Set what :func:`_random_states` returned. A generator that did not exist then keeps its state."""
    for sampler, numbers in zip(_samplers(loader), states["numbers"], strict=True):
        for key, value in numbers.items():
            setattr(sampler, key, value)
    for path, generator in _generators(loader).items():
        if path in states["generators"]:
            _write(generator, states["generators"][path])
    set_random_state(states["random"])


def _samplers(loader: Any) -> list[Any]:
    return [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]


def _generators(loader: Any) -> dict[str, Any]:
    """Return the generators that a loader draws by, each with its path of attributes and items."""
    names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")  # without its iterator and processes
    generators = {}
    seen: set[int] = set()
    pending = [(name, getattr(loader, name)) for name in names]
    for path, owner in pending:  # grows meanwhile
        is_data = isinstance(owner, dict | list | tuple) and len(owner) > MAX_ITEMS
        if is_data or id(owner) in seen or isinstance(owner, _OPAQUE) or path.count(".") > MAX_DEPTH:
            continue
        seen.add(id(owner))
        if isinstance(owner, _GENERATORS):
            generators[path] = owner
            continue
        children = getattr(owner, "__dict__", {})
        if isinstance(owner, dict):
            children = owner
        elif isinstance(owner, list | tuple):
            children = dict(enumerate(owner))
        pending += [(f"{path}.{name}", child) for name, child in list(children.items())]
    return generators


def _read(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=lambda array: array.tolist())  # torch.load(weights_only=True) reads no arrays


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())  # torch.load() may have moved it
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)
