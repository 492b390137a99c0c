"""Move batches and their content to a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("det_core.training")
NUMERIC = "fciub"
"""Kinds of numpy arrays that become tensors."""


def to_device(data: Any, device: torch.device, warned: set[type] | None = None) -> Any:
    """Return ``data`` with its tensors and numeric arrays on ``device``.

    Args:
        data: tensors, numpy arrays, objects with a ``to()``, and nested lists, tuples and mappings of these, whose
            types are kept if they can be constructed. Other objects are returned unchanged.
        device: target device.
        warned: types for which a warning was logged; extended.
    """
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if type(data) not in (dict, list, tuple) and callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        return _like(data, {key: to_device(value, device, warned) for key, value in data.items()})
    if isinstance(data, list | tuple):
        moved = [to_device(value, device, warned) for value in data]
        if hasattr(data, "_fields"):  # a named tuple
            return type(data)(*moved)
        return _like(data, moved)
    kind = getattr(getattr(data, "dtype", None), "kind", "")
    if type(data).__module__ == "numpy" and kind and kind in NUMERIC:
        return torch.as_tensor(data).to(device, non_blocking=True)
    _warn(data, warned)
    return data


def mover(device: torch.device, warned: set[type] | None = None) -> Callable[[Any], Any]:
    """Return the function that moves batches to ``device``."""
    if device.type != "cpu":
        return lambda batch: to_device(batch, device, warned)

    def stay(batch: Any) -> Any:
        # The usual batch, a list of tensors of the CPU, is returned without a copy of the list.
        if type(batch) is list:
            for item in batch:
                if type(item) is not Tensor or not item.is_cpu:
                    return to_device(batch, device, warned)
            return batch
        return to_device(batch, device, warned)

    return stay


def _like(container: Any, content: Any) -> Any:
    """Return ``content`` in a container of the same type, or in a built-in one if that fails."""
    if type(container) is type(content):
        return content
    try:
        return type(container)(content)
    except Exception:  # a user-defined type with another constructor
        if isinstance(container, tuple):
            return tuple(content)
        return content


def _warn(data: Any, warned: set[type] | None) -> None:
    kind = type(data)
    if warned is None or kind in warned or data is None or isinstance(data, int | float | bool):
        return
    warned.add(kind)
    logger.warning("leaving values of type %s in a batch on their device", kind.__name__)
