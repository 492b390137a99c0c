"""Metrics of batches, kept where they are until somebody needs numbers: no waiting for a device per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class MetricBuffer:
    """Rows of metrics with their values as of :meth:`add`; :meth:`take` gives all of them as values of the host."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._waiting: list[tuple[dict[str, Any], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Keep a row. A later change of a tensor in place does not count.

        Args:
            metrics: tensors of any shape and device, numbers, arrays, None, text. The mapping itself is not kept.
        """
        row: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                if not value.is_cpu:
                    value = value.detach().clone()  # on its stream
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
        """The rows since the last call, in order; scalar tensors as numbers, others as numpy arrays."""
        rows, self._rows = self._rows, []
        waiting, self._waiting = self._waiting, []
        hosts = _to_host([row[name] for row, name in waiting]) if waiting else ()
        for (row, name), host in zip(waiting, hosts, strict=True):
            row[name] = host.item() if host.ndim == 0 else _as_numpy(host)
        return rows


def _as_numpy(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """On the CPU, by one transfer for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for which in kinds.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in which]).cpu()
        pieces = flat.split([tensors[i].numel() for i in which])
        found.update({i: piece.reshape(tensors[i].shape) for i, piece in zip(which, pieces, strict=True)})
    return [found[i] for i in range(len(tensors))]
