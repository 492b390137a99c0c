"""Utilities: fewer batches, functions on one rank, an average of weights, seeds, padding."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from det_core._env import LIMIT_BATCHES, Environment, swap_variable
from det_core._training.data_order import mixed_seed, seed_generators

LIMIT_BATCHES_ENV_VAR = LIMIT_BATCHES
"""Environment variable that limits the batches of trainers made while it is set."""
P = ParamSpec("P")
R = TypeVar("R")


class LimitBatches:
    """Limit of the batches of each loader for trainers made inside ``with LimitBatches(2):``.

    Afterwards, the previous limit applies again.

    Args:
        num_batches: number of batches.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self._earlier: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._earlier.append(swap_variable(LIMIT_BATCHES_ENV_VAR, str(self.num_batches)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        swap_variable(LIMIT_BATCHES_ENV_VAR, self._earlier.pop())


class DataLoaderSlice:
    """The first batches of a loader, with the other attributes of the loader.

    Args:
        dl: the loader.
        slice_size: maximum number of batches.
    """

    _is_det_core = True

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = slice_size
        self._first = 0

    def begin(self, epoch: int, first: int = 0) -> None:
        """Set the next epoch, and the batch in it with which a resume begins."""
        self._first = first
        if getattr(self.dl, "_is_det_core", False):  # accelerate's loaders have another begin()
            self.dl.begin(epoch, first)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, max(self.slice_size - self._first, 0))

    def __len__(self) -> int:
        return min(self.slice_size, len(self.dl))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":  # pickle asks before __init__
            raise AttributeError(name)
        return getattr(self.dl, name)


class ModelEma(nn.Module):
    """Exponential moving average of a model's weights (Polyak averaging, as Izmailov et al., 2018, and others).

    Args:
        model: the model, without wrappers.
        decay: fraction of the average that an update keeps, from 0 to 1.

    Attributes:
        module: the average, a copy of the model in evaluation mode and without gradients.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    def update_fn(self, ema: Tensor, new: Tensor) -> Tensor:
        """Return the new average of an entry from its average and the model's value; override it if needed."""
        return self.decay * ema + (1 - self.decay) * new

    def update(self, model: nn.Module) -> None:
        """Update the average with the parameters and saved buffers of the model.

        Integers and booleans, such as counts and flags, are copied.
        """

        def average(ema: Tensor, new: Tensor) -> Tensor:
            if ema.is_floating_point() or ema.is_complex():
                return self.update_fn(ema, new)
            return new

        self._update(model, average)

    def set(self, model: nn.Module) -> None:
        """Set the average to the model."""
        self._update(model, lambda ema, new: new)

    def _update(self, model: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        news = model.state_dict(keep_vars=True)
        # By object, so that an entry shared by two modules is updated once.
        entries = {id(ema): (ema, news[name]) for name, ema in self.module.state_dict(keep_vars=True).items()}
        with torch.no_grad():
            for ema, new in entries.values():
                if isinstance(ema, Tensor):  # and not a value of get_extra_state()
                    ema.copy_(function(ema, new.to(ema.device)))


def local_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on the first process of each node only; it returns None on the others.

    Processes of a process group wait for each other, and a failure raises an error on all of them. Without a group,
    they do not wait.
    """
    return _only(function, lambda: _place()[1] == 0)


def world_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on the first process of all only, like :func:`local_process_zero_only`."""
    return _only(function, lambda: _place()[0] == 0)


def local_process_zero_first(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run on the first process of each node, and then on the others, such as a download.

    Each process gets its own result. A failure on a first process raises an error on all. The decorated function raises
    RuntimeError if several processes have no process group.
    """

    first = local_process_zero_only(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        _, local_rank, size = _place()
        if size > 1 and not _grouped():
            raise RuntimeError(
                f"{function.__qualname__}() cannot wait for another process without a process group: call it after the "
                "Trainer is made, or call torch.distributed.init_process_group() before"
            )
        result = first(*args, **kwargs)
        if local_rank != 0:
            result = function(*args, **kwargs)
        return result  # type: ignore[return-value]

    return wrapper


def _only(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        result = None
        error = None
        try:
            if here():
                result = function(*args, **kwargs)
        except BaseException as e:  # raised below: the others wait for this rank
            error = e
        failures = [""]
        if error is not None:
            failures = [f"{type(error).__name__}: {error}"]
        if _grouped():
            failures *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(failures, failures[0])
        if error is not None:
            raise error
        if failure := next(filter(None, failures), None):
            raise RuntimeError(f"{function.__qualname__}() failed on another rank: {failure}")
        return result

    return wrapper


def _grouped() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _place() -> tuple[int, int, int]:
    """Return the rank of this process, its local rank, and the number of processes."""
    launch = Environment.read().launch
    rank = int(launch.get("RANK", 0))
    size = int(launch.get("WORLD_SIZE", 1))
    if _grouped():
        rank = torch.distributed.get_rank()
        size = torch.distributed.get_world_size()
    return rank, int(launch.get("LOCAL_RANK", rank)), size


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of the order of a shuffled epoch.

    A plain loop has the same order with ``generator.manual_seed(epoch_seed(seed, epoch))`` before each epoch, where
    ``generator`` belongs to its ``RandomSampler(dataset, generator=generator)``. It has the same random numbers too if
    its loader has another generator; otherwise the loader draws from the global one in each epoch.

    Args:
        seed: seed of the Trainer.
        epoch: epoch, from 0.
    """
    return mixed_seed(seed, epoch)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, numpy (if imported) and torch with its devices.

    Args:
        seed: the seed.
        device_specific: add the rank to the seed.
        deterministic: make torch use deterministic algorithms.
    """
    if device_specific:
        seed += _place()[0]
    torch.manual_seed(seed)
    seed_generators(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def worker_init_fn(worker_id: int) -> None:
    """Seed the generators of torch, Python and numpy in a worker from the seed that its loader set.

    Workers then draw different numbers, and the same ones in each run with the same seed.

    Args:
        worker_id: number of the worker, which is part of the seed already.
    """
    seed_generators(torch.initial_seed())


def remove_padding(tensor: Tensor, pad_value: float) -> Tensor:
    """Drop the rows, along the first dimension, in which every element is ``pad_value`` (also NaN)."""
    padding = tensor == pad_value
    if pad_value != pad_value:  # NaN
        padding = tensor.isnan()
    if padding.dim() > 1:
        padding = padding.flatten(1).all(dim=1)
    return tensor[~padding]
