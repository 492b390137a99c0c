"""State of a DataLoader in this process: what the batches of a pass are drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from det_core.core._random_state import random_state, set_random_state

MAX_DEPTH = 8
"""Attributes and items from a loader to a generator that is part of its state."""
MAX_ITEMS = 100
"""Items of a container that is searched for generators; longer ones are data."""


def loader_state(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of what the loader holds, and the numbers that its samplers keep."""
    return {
        "random": random_state(),
        "generators": {path: read() for path, (read, _) in _generators(loader).items()},
        "numbers": {
            name: {key: value for key, value in getattr(sampler, "__dict__", {}).items() if type(value) is int}
            for name, sampler in _samplers(loader).items()
        },
    }


def set_loader_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Set what :func:`loader_state` returned. A generator that did not exist then keeps its state."""
    for name, sampler in _samplers(loader).items():
        for key, value in state["numbers"][name].items():
            setattr(sampler, key, value)
    for path, (_, write) in _generators(loader).items():
        if path in state["generators"]:
            write(state["generators"][path])
    set_random_state(state["random"])


def check_epoch(loader: Any, state: Mapping[str, Any]) -> None:
    """Raise ValueError where ``set_epoch()`` was called with another epoch than that of a state."""
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):  # others count epochs by themselves
        return
    expected = state["numbers"]["sampler"]["epoch"]
    if sampler.epoch != expected:
        raise ValueError(
            f"set_epoch({sampler.epoch}): expected {expected}, the epoch under way at the checkpoint; begin the loop "
            "with the epoch of the resumable loader"
        )


def describe(loader: Any) -> dict[str, Any]:
    """Return the properties that two loaders share if a position in one is a position in the other."""
    # torch warns once an IterableDataset gives more than the length that was asked for.
    has_length = not isinstance(loader.dataset, IterableDataset)
    samplers = _samplers(loader).values()
    description = {
        "length": _length(loader) if has_length else None,
        "records": _length(loader.dataset) if has_length else None,
        "samplers": ", ".join(type(sampler).__name__ for sampler in samplers),
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
    }
    for name in ("batch_size", "rank", "num_replicas"):
        values = [getattr(owner, name, None) for owner in (loader, *samplers)]
        description[name] = next((value for value in values if isinstance(value, int)), None)
    return description


@contextmanager
def replaced(loader: Any, **parts: Any) -> Iterator[None]:
    """Give a loader other parts for the iterator that is made here; torch does not let them be set."""
    originals = {name: vars(loader)[name] for name in parts}
    vars(loader).update(parts)
    try:
        yield
    finally:
        vars(loader).update(originals)


def _samplers(loader: Any) -> dict[str, Any]:
    inner = getattr(loader.batch_sampler, "sampler", None)
    samplers = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler, "batch_sampler.sampler": inner}
    return {name: sampler for name, sampler in samplers.items() if sampler is not None}


def _generators(loader: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return how the state of each generator that a loader draws by is read and set, by its path."""
    parts = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")  # without its iterator and processes
    return dict(_find_generators({name: getattr(loader, name) for name in parts}, "", set()))


def _find_generators(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield how the state of each generator in an object is read and set, with its path of attributes and items."""
    if id(owner) in seen or path.count(".") > MAX_DEPTH or isinstance(owner, type | ModuleType | FunctionType):
        return
    seen.add(id(owner))
    children = getattr(owner, "__dict__", {}).items()
    match owner:
        case torch.Generator():
            yield path, (owner.get_state, lambda state: owner.set_state(state.cpu()))  # torch.load() may have moved it
            return
        case numpy.random.Generator():
            held = owner.bit_generator
            yield path, (lambda: _plain(held.state), lambda state: setattr(held, "state", state))
            return
        case numpy.random.RandomState():
            yield path, (lambda: _plain(owner.get_state(legacy=False)), owner.set_state)
            return
        case random.Random() if not isinstance(owner, random.SystemRandom):
            yield path, (owner.getstate, owner.setstate)
            return
        case dict() | list() | tuple() if len(owner) <= MAX_ITEMS:
            children = owner.items() if isinstance(owner, dict) else enumerate(owner)
    for name, child in list(children):
        yield from _find_generators(child, f"{path}.{name}", seen)


def _plain(state: Any) -> Any:
    """Return the state of a numpy generator without arrays, which ``torch.load(weights_only=True)`` does not read."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray) else state


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
