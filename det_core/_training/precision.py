"""Mixed precision around the forward pass of a model, without changes to its class and callers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Replace a model's ``forward`` by one that runs under autocast and returns float32.

    The model stays an instance of its class, with the same ``state_dict()``. A deep copy uses its own weights.
    """
    given = model.forward
    of_model = isinstance(given, types.MethodType) and given.__self__ is model
    inner: Callable[..., Any] = lambda _self, *args, **kwargs: given(*args, **kwargs)  # noqa: E731
    if of_model:
        inner = given.__func__

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = inner(self, *args, **kwargs)
        return to_float32(outputs)

    model.forward = types.MethodType(
        forward, model
    )  # deepcopy() binds methods to the copy, such as an average of weights


def to_float32(outputs: Any) -> Any:
    """Return ``outputs`` with half-precision tensors as float32, in nested lists, tuples and dictionaries."""
    if isinstance(outputs, Tensor):
        if outputs.dtype in HALVES:
            return outputs.float()
        return outputs
    if isinstance(outputs, Mapping):
        values = {key: to_float32(value) for key, value in outputs.items()}
        if type(outputs) is dict:
            return values
        return type(outputs)(**values)  # such as the output classes of transformers
    if isinstance(outputs, list | tuple):
        items = [to_float32(value) for value in outputs]
        if hasattr(outputs, "_fields"):  # a named tuple
            return type(outputs)(*items)
        return type(outputs)(items)
    return outputs
