"""Fingerprints of what a training consists of: weights, optimizers, schedulers, scalers, random states, batches.

Objects are found by the garbage collector, so a script needs to name none of them.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import det_core
from det_core.core import random_state

MAX_SAMPLED = 4096
"""Elements of a tensor of a batch, or of an object of the script, that its digest is made of."""
MAX_DEPTH = 12


@dataclass
class LiveObjects:
    """Objects of this process that a checkpoint should be about, by kind.

    ``own`` are those of classes that the script and its modules define, and environments.
    """

    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)


@dataclass
class Snapshot:
    """State of a training at one moment.

    Attributes:
        parts: digest by part: ``model``, ``copy`` (a module of the same shape as the model, such as an EMA),
            ``module``, ``optimizer``, ``lr``, ``scheduler``, ``scaler``; what the training does not have is not there.
        random: digest of the state of each random number generator.
        objects: digest by class of the objects that the script defines, and of environments.
        has_loader: whether there is a DataLoader.
    """

    parts: dict[str, str]
    random: dict[str, str]
    objects: dict[str, str]
    has_loader: bool

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        return vars(self)


def take_snapshot(root: Any) -> Snapshot:
    """Return the state of this process's training.

    Args:
        root: the module that is trained; None: there is none.
    """
    live = live_objects()
    model, copies, others = _by_role(root, live.modules) if root is not None else ([], [], [])
    groups = {
        "model": [_weights(module) for module in model],
        "copy": [_weights(module) for module in copies],
        "module": [_weights(module) for module in others],
        "optimizer": [optimizer.state_dict()["state"] for optimizer in live.optimizers],
        "lr": [optimizer.state_dict()["param_groups"] for optimizer in live.optimizers],
        "scheduler": [scheduler.state_dict() for scheduler in live.schedulers],
        "scaler": [scaler.state_dict() for scaler in live.scalers],
    }
    objects: dict[str, list[Any]] = {}
    for thing in live.own:
        objects.setdefault(type(thing).__name__, []).append(vars(thing))
    return Snapshot(
        parts={name: digest(states) for name, states in groups.items() if states},
        random=digests_of_random_states(),
        objects={name: digest(states, MAX_SAMPLED) for name, states in objects.items()},
        has_loader=bool(live.loaders),
    )


def live_objects() -> LiveObjects:
    """Return the objects of this process by kind, each kind in the order in which they were made."""
    found = LiveObjects()
    lists: dict[type, list[Any] | None] = {}
    # The collector's list is in the order of making, so objects of two trainings correspond by their place.
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in lists:  # once a type: there may be a million objects
            lists[kind] = _list_of(kind, found)
        if (objects := lists[kind]) is not None:
            objects.append(thing)
    return found


def _list_of(kind: type, found: LiveObjects) -> list[Any] | None:
    if (torch := sys.modules.get("torch")) is not None:
        kinds = [
            (torch.nn.Module, found.modules),
            (torch.optim.Optimizer, found.optimizers),
            (torch.optim.lr_scheduler.LRScheduler, found.schedulers),
            (torch.amp.GradScaler, found.scalers),
            (torch.utils.data.DataLoader, found.loaders),
        ]
        for base, objects in kinds:
            if base in kind.__mro__:
                return objects
    # An environment of a library, such as gymnasium, has a state too.
    is_environment = callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))
    if hasattr(kind, "__dict__") and (_is_of_script(kind) or is_environment):
        return found.own
    return None


def _is_of_script(kind: type) -> bool:
    """Return whether a class is defined by the script or a module beside it, not by a library."""
    module = kind.__module__
    if not isinstance(module, str):  # a property of some classes that are written in C
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not any(place in file for place in _LIBRARIES)


_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), os.path.dirname(det_core.__file__))


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


def digests_of_random_states() -> dict[str, str]:
    """Return a digest of the state of each generator of :func:`det_core.core.random_state`."""
    return {name: digest(state) for name, state in random_state().items()}


def digest(value: Any, limit: int | None = None) -> str:
    """Return a digest of tensors, numbers and texts at any depth; of anything else its type counts.

    Args:
        value: the value.
        limit: how many elements of a tensor count. Defaults to None: all.
    """
    sums = hashlib.blake2b(digest_size=16)
    _add(sums, value, limit)
    return sums.hexdigest()


def _add(sums: Any, value: Any, limit: int | None, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sums.update(f"{key}:".encode())
            _add(sums, value[key], limit, depth + 1)
    elif isinstance(value, list | tuple):
        sums.update(f"[{len(value)}".encode())
        for item in value:
            _add(sums, item, limit, depth + 1)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        sums.update(f"{tuple(value.shape)}{value.dtype}".encode())
        sums.update(bytes_of(value, limit))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        sums.update(repr(value).encode())
    else:
        _add_object(sums, value, limit, depth)


def _add_object(sums: Any, value: Any, limit: int | None, depth: int) -> None:
    """Add arrays, and the states of generators that are not the global ones."""
    sums.update(type(value).__name__.encode())
    if isinstance(value, random.Random):
        sums.update(repr(value.getstate()).encode())
    elif type(value).__module__ == "torch._C" and hasattr(value, "get_state"):
        _add(sums, value.get_state(), limit, depth)
    elif type(value).__module__.startswith("numpy"):
        if hasattr(value, "bit_generator"):
            _add(sums, value.bit_generator.state, limit, depth)
        elif hasattr(value, "tobytes"):
            sums.update(value.tobytes())


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
