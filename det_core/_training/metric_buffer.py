"""Metrics of batches, kept on their device until they are needed, so that no batch waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class MetricBuffer:
    """Rows of metrics with the values they had in :meth:`add`; :meth:`take` copies them to the host."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._waiting: list[tuple[dict[str, Any], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add a row with copies of its tensors and arrays.

        Args:
            metrics: tensors of any shape and device, numbers, arrays, None, text.
        """
        row: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                if not value.is_cpu:
                    value = value.detach().clone()  # on the stream of the device: the call does not wait
                    self._waiting.append((row, name))
                elif value.ndim:
                    value = _as_numpy(value.detach().clone())
                else:
                    value = value.item()
            elif type(value).__module__ == "numpy":
                value = value.copy()
            row[name] = value
        self._rows.append(row)

    def take(self) -> list[dict[str, Any]]:
        """Remove and return all rows in order, with scalar tensors as numbers and others as numpy arrays."""
        rows = self._rows
        waiting = self._waiting
        self._rows = []
        self._waiting = []
        for (row, name), host in zip(waiting, _to_host([row[name] for row, name in waiting]), strict=True):
            if host.ndim == 0:
                row[name] = host.item()
            else:
                row[name] = _as_numpy(host)
        return rows


def _as_numpy(tensor: Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:  # numpy does not have it
        tensor = tensor.float()
    return tensor.numpy()


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU, with one transfer for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for which in kinds.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in which]).cpu()
        pieces = flat.split([tensors[i].numel() for i in which])
        found.update({i: piece.reshape(tensors[i].shape) for i, piece in zip(which, pieces, strict=True)})
    return [found[i] for i in range(len(tensors))]
