"""Which numbers of a report become scalars, taken as they are at the time of the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

Scalar = float | Callable[[], float]
"""A number, or what waits for one that is still on its way from a device."""


def scalars_of(prefix: str, metrics: Mapping[str, Any]) -> list[tuple[str, Scalar]]:
    """Return tag and number for each number in ``metrics``; what is no number is left out. ``prefix`` begins each tag.

    A number on a device is copied on its stream, so that nothing waits for the device here and a later
    change in place does not count.
    """
    found: list[tuple[str, Scalar]] = []
    _collect(prefix, metrics, found)
    return found


def _collect(prefix: str, metrics: Mapping[str, Any], found: list[tuple[str, Scalar]]) -> None:
    for key, value in metrics.items():
        if type(value) is float:
            found.append((f"{prefix}{key}", value))
        elif isinstance(value, Mapping):
            _collect(f"{prefix}{key}/", value, found)
        elif (number := _number(value)) is not None:
            found.append((f"{prefix}{key}", number))


def _number(value: Any) -> Scalar | None:
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    if getattr(value, "shape", None) != () or getattr(value.dtype, "kind", "f") in "cSUOMm":
        return None
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            return _tensor(torch, value)
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _tensor(torch: Any, value: Any) -> Scalar:
    if value.device.type != "cuda":
        return float(value.detach())
    copy = value.detach().clone()
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))

    def wait() -> float:
        copied.synchronize()
        return float(copy)

    return wait
