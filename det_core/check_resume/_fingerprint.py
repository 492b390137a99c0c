"""Fingerprints of what a training consists of: weights, optimizers, schedulers, scalers, random states, batches.

Objects are found by the garbage collector, so a script needs to name none of them.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SAMPLED = 4096
"""Elements of a tensor of a batch that its digest is made of."""


@dataclass
class LiveObjects:
    """Objects of this process that a checkpoint should be about, by kind."""

    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    environments: list[Any] = field(default_factory=list)


@dataclass
class Snapshot:
    """State of a training at one moment.

    Attributes:
        parts: digest by part: ``model``, ``copy`` (a module of the same shape as the model, such as an EMA),
            ``module``, ``optimizer``, ``lr``, ``scheduler``, ``scaler``; what the training does not have is not there.
        random: digest of the state of each random number generator.
        has_loader: whether there is a DataLoader.
        environments: class names of objects with ``reset()`` and ``step()``.
    """

    parts: dict[str, str]
    random: dict[str, str]
    has_loader: bool
    environments: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        return vars(self)


def take_snapshot(root: Any) -> Snapshot:
    """Return the state of this process's training.

    Args:
        root: the module that is trained.
    """
    live = live_objects()
    model, copies, others = _by_role(root, live.modules)
    groups = {
        "model": [_weights(module) for module in model],
        "copy": [_weights(module) for module in copies],
        "module": [_weights(module) for module in others],
        "optimizer": [optimizer.state_dict()["state"] for optimizer in live.optimizers],
        "lr": [optimizer.state_dict()["param_groups"] for optimizer in live.optimizers],
        "scheduler": [scheduler.state_dict() for scheduler in live.schedulers],
        "scaler": [scaler.state_dict() for scaler in live.scalers],
    }
    return Snapshot(
        parts={name: digest(states) for name, states in groups.items() if states},
        random={name: digest(state) for name, state in _random_states().items()},
        has_loader=bool(live.loaders),
        environments=sorted({type(environment).__name__ for environment in live.environments}),
    )


def live_objects() -> LiveObjects:
    """Return the objects of this process by kind, each kind in the order in which they were made."""
    found = LiveObjects()
    lists: dict[type, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in lists:
            lists[kind] = _list_of(kind, found)
        if (objects := lists[kind]) is not None:
            objects.append(thing)
    return found


def _list_of(kind: type, found: LiveObjects) -> list[Any] | None:
    import torch

    kinds = [
        (torch.nn.Module, found.modules),
        (torch.optim.Optimizer, found.optimizers),
        (torch.optim.lr_scheduler.LRScheduler, found.schedulers),
        (torch.amp.GradScaler, found.scalers),
        (torch.utils.data.DataLoader, found.loaders),
    ]
    try:
        for base, objects in kinds:
            if issubclass(kind, base):
                return objects
    except TypeError:  # of a class with an unusual metaclass
        return None
    module = kind.__module__
    if not isinstance(module, str):  # a property of some classes that are written in C
        return None
    is_library = module.partition(".")[0] in ("torch", "det_core", "numpy", "builtins")
    is_environment = callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))
    return found.environments if is_environment and not is_library else None


def _by_role(root: Any, modules: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the trained module, those of the same shape, and all other outermost modules with parameters."""
    inner = {id(child) for module in modules for child in module.children()}
    outermost = [module for module in modules if id(module) not in inner and any(True for _ in module.parameters())]
    shape = _shape(root)
    trained = {id(parameter) for parameter in root.parameters()}
    model: list[Any] = []
    copies: list[Any] = []
    others: list[Any] = []
    for module in outermost:
        if any(id(parameter) in trained for parameter in module.parameters()):
            model.append(module)
        elif _shape(module) == shape:
            copies.append(module)
        else:
            others.append(module)
    return model[:1], copies, others


def _shape(module: Any) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()]


def _weights(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _random_states() -> dict[str, Any]:
    torch = sys.modules["torch"]
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def digest(value: Any) -> str:
    """Return a digest of tensors, numbers and texts at any depth; of anything else its type counts."""
    sums = hashlib.blake2b(digest_size=16)
    _add(sums, value)
    return sums.hexdigest()


def digest_of_batch(value: Any) -> str:
    """Return a digest of a sample of every tensor at any depth."""
    sums = hashlib.blake2b(digest_size=16)
    _add(sums, value, MAX_SAMPLED)
    return sums.hexdigest()


def _add(sums: Any, value: Any, limit: int | None = None) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sums.update(f"{key}:".encode())
            _add(sums, value[key], limit)
    elif isinstance(value, list | tuple | set | frozenset):
        sums.update(f"[{len(value)}".encode())
        for item in value:
            _add(sums, item, limit)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        sums.update(f"{tuple(value.shape)}{value.dtype}".encode())
        sums.update(bytes_of(value, limit))
    elif type(value).__module__ == "numpy":
        sums.update(value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        sums.update(repr(value).encode())
    else:
        sums.update(type(value).__name__.encode())


def bytes_of(tensor: Any, limit: int | None = None) -> Any:
    """Return the bytes of a tensor, or of evenly spread elements of it."""
    import torch

    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return repr(tensor).encode()
    if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
        tensor = tensor.to_local()
    flat = tensor.reshape(-1)
    if limit is not None and flat.numel() > limit:
        flat = flat[:: -(-flat.numel() // limit)]
    flat = flat.contiguous().cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())  # without numpy, and of any dtype
