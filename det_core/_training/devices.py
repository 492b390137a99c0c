"""Moving batches, and what is in them, to a device; on a CPU nearly nothing is done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("det_core.training")
NUMERIC = "fciub"
"""The kinds of numpy arrays that become tensors."""


def to_device(data: Any, device: torch.device, warned: set[type] | None = None) -> Any:
    """``data`` with the tensors and numeric arrays in it on ``device``.

    Args:
        data: tensors, numpy arrays, anything with a ``to()``, and lists, tuples and mappings of these of any depth,
            which keep their types where these can be made anew. All else comes back as it is.
        device: where to.
        warned: the types of which a warning has said that they are not moved; more are added.
    """
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if type(data) not in (dict, list, tuple) and callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        return _like(data, {key: to_device(value, device, warned) for key, value in data.items()})
    if isinstance(data, list | tuple):
        moved = [to_device(value, device, warned) for value in data]
        return type(data)(*moved) if hasattr(data, "_fields") else _like(data, moved)
    kind = getattr(getattr(data, "dtype", None), "kind", "")  # of numpy's
    if type(data).__module__ == "numpy" and kind and kind in NUMERIC:
        return torch.as_tensor(data).to(device, non_blocking=True)
    _warn(data, warned)
    return data


def mover(device: torch.device, warned: set[type] | None = None) -> Callable[[Any], Any]:
    """What moves a batch to ``device``, decided once."""
    if device.type != "cpu":
        return lambda batch: to_device(batch, device, warned)

    def stay(batch: Any) -> Any:
        if type(batch) is list:
            for item in batch:
                if type(item) is not Tensor or not item.is_cpu:
                    return to_device(batch, device, warned)
            return batch
        return to_device(batch, device, warned)

    return stay


def _like(container: Any, content: Any) -> Any:
    """``content`` in a container of the same type; plain where that cannot be made of it."""
    if type(container) is type(content):
        return content
    try:
        return type(container)(content)
    except Exception:  # a type of the user's with a constructor of its own
        return tuple(content) if isinstance(container, tuple) else content


def _warn(data: Any, warned: set[type] | None) -> None:
    kind = type(data)
    if warned is None or kind in warned or data is None or isinstance(data, int | float | bool):
        return
    warned.add(kind)
    logger.warning("values of type %s in a batch are not moved to the device", kind.__name__)
