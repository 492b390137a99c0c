"""Large CPU tensors out of band: torch's own pickling copies a tensor's bytes into the pickle, twice."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

LARGE = 1 << 16
"""Bytes from which a tensor is worth it."""


def dumps(obj: Any, keep: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    """``pickle.dumps`` with out-of-band buffers, those of plain tensors included where torch is loaded."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "Tensor"):
        return pickle.dumps(obj, protocol=5, buffer_callback=keep)
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce}  # type: ignore[union-attr]
    pickler.dump(obj)
    return out.getvalue()


def _reduce(tensor: Any) -> Any:
    import torch

    plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and tensor.nbytes >= LARGE
    )
    if not plain:
        return tensor.__reduce_ex__(5)
    try:
        raw = tensor.view(-1).view(torch.uint8).numpy()
    except RuntimeError:  # torch without numpy
        return tensor.__reduce_ex__(5)
    return rebuild, (pickle.PickleBuffer(raw), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def rebuild(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """The tensor over the memory ``raw``: called by pickle."""
    import torch

    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)
