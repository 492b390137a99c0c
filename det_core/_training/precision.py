"""Mixed precision around one model's forward pass, without a change to its class or to who calls it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run a model's ``forward`` under autocast from now on, and give its outputs as float32.

    The instance gets a ``forward`` of its own, so it stays one of the user's class. ``state_dict()`` is as before. A
    deep copy (of an average of weights, say) computes with its own weights.
    """
    given = model.forward
    of_model = isinstance(given, types.MethodType) and given.__self__ is model
    inner: Callable[..., Any] = given.__func__ if of_model else lambda _self, *args, **kwargs: given(*args, **kwargs)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = inner(self, *args, **kwargs)
        return to_float32(outputs)

    model.forward = types.MethodType(forward, model)  # a method: deepcopy() binds those to the copy


def to_float32(outputs: Any) -> Any:
    """``outputs`` with half-precision tensors in it as float32, in lists, tuples and dictionaries of any depth."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in HALVES else outputs
    if isinstance(outputs, Mapping):
        values = {key: to_float32(value) for key, value in outputs.items()}
        return values if type(outputs) is dict else type(outputs)(**values)  # an output class of transformers, say
    if isinstance(outputs, list | tuple):
        items = [to_float32(value) for value in outputs]
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    return outputs
