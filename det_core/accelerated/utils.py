"""Smaller helps: fewer batches, functions of one rank, an average of a model's weights, seeds, padding."""

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
"""The environment variable that limits the batches of trainers that are made while it is set."""
P = ParamSpec("P")
R = TypeVar("R")


class LimitBatches:
    """Trainers that are made inside ``with LimitBatches(2):`` use only the first two batches of each loader.

    The earlier limit holds again afterwards.

    Args:
        num_batches: how many batches.
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
    """The first batches of a loader, each time it is iterated; all else is the loader's.

    Args:
        dl: the loader.
        slice_size: how many batches, if it has so many.
    """

    _is_det_core = True

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = slice_size
        self._first = 0

    def begin(self, epoch: int, first: int = 0) -> None:
        """Tell a loader of the Trainer which epoch is next, and with which of its batches a resume goes on in it."""
        self._first = first
        if getattr(self.dl, "_is_det_core", False):  # a loader of accelerate's has a begin() of its own
            self.dl.begin(epoch, first)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, max(self.slice_size - self._first, 0))

    def __len__(self) -> int:
        return min(self.slice_size, len(self.dl))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":  # asked for by pickle before there is any
            raise AttributeError(name)
        return getattr(self.dl, name)


class ModelEma(nn.Module):
    """An exponential moving average of a model's weights (Polyak averaging, as Izmailov et al., 2018, and others).

    Args:
        model: the model, without wrappers.
        decay: how much of the average stays at an update, from 0 to 1.

    Attributes:
        module: the average: a copy of the model in evaluation mode, which has no gradients.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    def update_fn(self, ema: Tensor, new: Tensor) -> Tensor:
        """The new average of an entry from its average and its value in the model; override it for another one."""
        return self.decay * ema + (1 - self.decay) * new

    def update(self, model: nn.Module) -> None:
        """Take in the model: all parameters and buffers that are saved with it. Counts, indices and flags, of which
        there is no average, are set to the model's."""
        self._update(model, lambda ema, new: self.update_fn(ema, new) if _averages(ema) else new)

    def set(self, model: nn.Module) -> None:
        """Begin anew from the model."""
        self._update(model, lambda ema, new: new)

    def _update(self, model: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        news = model.state_dict(keep_vars=True)
        # by the parameters themselves, so that what two modules share is taken in once
        entries = {id(ema): (ema, news[name]) for name, ema in self.module.state_dict(keep_vars=True).items()}
        with torch.no_grad():
            for ema, new in entries.values():
                if isinstance(ema, Tensor):  # not what get_extra_state() gave
                    ema.copy_(function(ema, new.to(ema.device)))


def _averages(entry: Tensor) -> bool:
    return bool(entry.is_floating_point() or entry.is_complex())


def local_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Call the function on the first process of each node; elsewhere it gives None.

    All processes of a process group go on together. If the function fails, that is an error on all of them. Before
    there is a group, they do not wait for each other.
    """
    return _only(function, lambda: _place()[1] == 0)


def world_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Call the function on the first process of all, as :func:`local_process_zero_only` does per node."""
    return _only(function, lambda: _place()[0] == 0)


def local_process_zero_first(function: Callable[P, R]) -> Callable[P, R]:
    """Call the function on the first process of each node, and when all of these are done on the others; each gets
    its own result. For downloads, say: the others then find what the first one has fetched.

    If it fails on a first process, that is an error on all. The decorated function raises a RuntimeError where several
    processes have no process group yet, in which they could wait.
    """

    first = local_process_zero_only(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        _, local_rank, size = _place()
        if size > 1 and not _grouped():
            raise RuntimeError(
                f"{function.__qualname__}() is to wait for another process, but there is no process group yet: call it "
                "after the Trainer is made, or call torch.distributed.init_process_group() before"
            )
        result = first(*args, **kwargs)
        return result if local_rank == 0 else function(*args, **kwargs)  # type: ignore[return-value]

    return wrapper


def _only(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        result = None
        error = None
        try:
            result = function(*args, **kwargs) if here() else None
        except BaseException as e:  # the others would wait for ever
            error = e
        failed = [f"{type(error).__name__}: {error}" if error is not None else None]
        if _grouped():
            failed *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(failed, failed[0])
        if error is not None:
            raise error
        if texts := [text for text in failed if text is not None]:
            raise RuntimeError(f"{function.__qualname__}() has failed on another rank: {texts[0]}")
        return result

    return wrapper


def _grouped() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _place() -> tuple[int, int, int]:
    """The rank of this process, its rank on its node, and how many there are."""
    launch = Environment.read().launch
    rank = int(launch.get("RANK", 0))
    size = int(launch.get("WORLD_SIZE", 1))
    if _grouped():
        rank = torch.distributed.get_rank()
        size = torch.distributed.get_world_size()
    return rank, int(launch.get("LOCAL_RANK", rank)), size


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of a shuffled epoch's order.

    A plain loop sees the same order with ``generator.manual_seed(epoch_seed(seed, epoch))`` before each epoch, where
    ``generator`` is that of its ``RandomSampler(dataset, generator=generator)``; and the same random numbers, if its
    loader has another generator, as it draws from the global one each epoch otherwise.

    Args:
        seed: the Trainer's.
        epoch: counted from 0.
    """
    return mixed_seed(seed, epoch)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of python, numpy (where it is imported) and torch with its devices.

    Args:
        seed: the seed.
        device_specific: add the rank to it.
        deterministic: have torch use deterministic algorithms.
    """
    seed += _place()[0] if device_specific else 0
    torch.manual_seed(seed)
    seed_generators(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def worker_init_fn(worker_id: int) -> None:
    """Seed the generators of torch, Python and numpy in a worker of a loader from the seed that the loader gave it.

    So workers draw different numbers, and the same ones in each run that is seeded alike.

    Args:
        worker_id: which worker; its seed holds it already.
    """
    seed_generators(torch.initial_seed())


def remove_padding(tensor: Tensor, pad_value: float) -> Tensor:
    """Drop the rows, along the first dimension, in which every element is ``pad_value`` (also NaN)."""
    padding = tensor.isnan() if pad_value != pad_value else tensor == pad_value
    if padding.dim() > 1:
        padding = padding.flatten(1).all(dim=1)
    return tensor[~padding]
