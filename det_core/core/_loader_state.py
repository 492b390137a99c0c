"""State of a DataLoader: what its batches are drawn from, in this process and in workers that stay."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from det_core.core._random_state import random_state, set_random_state

MAX_DEPTH = 8
"""Attributes and items from a loader to a generator that is part of its state."""
MAX_ITEMS = 100
"""Items of a container that is searched for generators; longer ones are data."""
_reports: dict[int, dict[int, Any]] = {}
"""States of workers by loader and worker, while a pass begins."""


def loader_state(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of what the loader holds, and the numbers that its samplers keep."""
    return {
        "random": random_state(),
        "generators": {path: _generator_state(each) for path, each in _find_generators(_parts(loader))},
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
    for path, generator in _find_generators(_parts(loader)):
        if path in state["generators"]:
            _set_generator_state(generator, state["generators"][path])
    set_random_state(state["random"])


def check_epoch(loader: Any, state: Mapping[str, Any]) -> None:
    """Raise ValueError where ``set_epoch()`` was called with another epoch than that of a state."""
    for name, sampler in _samplers(loader).items():
        epoch = getattr(sampler, "epoch", None)
        expected = state["numbers"][name].get("epoch")
        if hasattr(sampler, "set_epoch") and epoch != expected:
            raise ValueError(
                f"set_epoch({epoch}): expected {expected}, the epoch under way at the checkpoint; begin the loop with "
                "the epoch of the resumable loader"
            )


def describe(loader: Any) -> dict[str, Any]:
    """Return the properties that two loaders share if a position in one is a position in the other."""
    from torch.utils.data import IterableDataset

    is_map_style = not isinstance(
        loader.dataset, IterableDataset
    )  # others are held by torch to a length once asked for
    samplers = _samplers(loader).values()
    description = {
        "length": _length(loader) if is_map_style else None,
        "records": _length(loader.dataset) if is_map_style else None,
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
    kept = {name: value for name, value in vars(loader).items() if name in parts}
    vars(loader).update({name: parts[name] for name in kept})
    try:
        yield
    finally:
        vars(loader).update(kept)


@contextmanager
def workers_reporting(loader: Any, states: dict[int, Any]) -> Iterator[None]:
    """Fill in the states of workers that stay from one pass to the next, while the iterator of the next one is made.

    torch begins the pass with a message that each worker sends back, once it is done with what it was given before.
    Only data pipes read the seed in it, so it takes a call to the worker and the answer back.
    """
    iterator = getattr(loader, "_iterator", None)
    if iterator is None or iterator._shared_seed is not None:
        yield
        return
    _reports[id(states)] = states
    iterator._shared_seed = _Call(_report, id(states))
    try:
        yield
    finally:
        iterator._shared_seed = None
        del _reports[id(states)]


def workers_resumed(loader: Any, states: Mapping[int, Any]) -> dict[str, Any]:
    """Return parts of a loader whose new workers begin with the states that others have reported."""
    from torch import Generator

    # Workers that stay are given no new seed, so it is not drawn from the generators of the script.
    return {"worker_init_fn": partial(_begin_worker, loader.worker_init_fn, states), "generator": Generator()}


class _Call:
    """A call that is made where this is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _report(key: int) -> _Call:
    """In a worker: answer with its states."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    generators = {path: _generator_state(each) for path, each in _find_generators(worker.dataset)}
    return _Call(_receive, key, worker.id, {"random": random_state(), "generators": generators})


def _receive(key: int, worker: int, state: Any) -> None:
    _reports[key][worker] = state


def _begin_worker(init: Any, states: Mapping[int, Any], worker: int) -> None:
    from torch.utils.data import get_worker_info

    if init is not None:
        init(worker)
    for path, generator in _find_generators(get_worker_info().dataset):
        if path in states[worker]["generators"]:
            _set_generator_state(generator, states[worker]["generators"][path])
    set_random_state(states[worker]["random"])


def _samplers(loader: Any) -> dict[str, Any]:
    inner = getattr(loader.batch_sampler, "sampler", None)
    samplers = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler, "batch_sampler.sampler": inner}
    return {name: sampler for name, sampler in samplers.items() if sampler is not None}


def _parts(loader: Any) -> dict[str, Any]:
    """Return what a loader draws by; its iterator and processes are no part of it."""
    names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")
    return {name: getattr(loader, name) for name in names}


def _find_generators(owner: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the generators of torch, numpy and python in an object, each with its path of attributes and items."""
    seen = set() if seen is None else seen
    if id(owner) in seen or path.count(".") > MAX_DEPTH or isinstance(owner, type | ModuleType | FunctionType):
        return
    seen.add(id(owner))
    if _kind(owner):
        yield path, owner
        return
    if isinstance(owner, dict):
        children = list(owner.items())
    elif isinstance(owner, list | tuple):
        children = list(enumerate(owner))
    else:
        children = list(getattr(owner, "__dict__", {}).items())
    if isinstance(owner, dict | list | tuple) and len(children) > MAX_ITEMS:
        return
    for name, child in children:
        yield from _find_generators(child, f"{path}.{name}", seen)


def _kind(value: Any) -> str:
    """Return which library's generator it is; nothing for anything else."""
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return "" if isinstance(value, random.SystemRandom) else "python"
    if torch is not None and isinstance(value, torch.Generator):
        return "torch"
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return "numpy"
    return "numpy, of old" if numpy is not None and isinstance(value, numpy.random.RandomState) else ""


def _generator_state(generator: Any) -> Any:
    """Return what ``torch.load(weights_only=True)`` reads: no array."""
    kind = _kind(generator)
    if kind == "python":
        return generator.getstate()
    if kind == "torch":
        return generator.get_state()
    return _plain(generator.bit_generator.state if kind == "numpy" else generator.get_state(legacy=False))


def _set_generator_state(generator: Any, state: Any) -> None:
    kind = _kind(generator)
    if kind == "python":
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif kind == "numpy":
        generator.bit_generator.state = state
    else:  # torch takes a tensor of the CPU; torch.load(map_location="cuda") has put it elsewhere
        generator.set_state(state.cpu() if kind == "torch" else state)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
