"""Values of which each rank has its own, in a state that the chief saves: gathered at the save, handed out at the load.

They lie in the state's file under one key, as a list by rank, so that ``torch.load`` alone reads all of them.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core._optional import require
from det_core._torch_states import refused, unreadable
from det_core.errors import CheckpointError

PER_RANK = "per_rank"
"""The key of the state that holds them."""


def to_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the values of this rank as the chief gets them: a worker's tensors may lie on a device of its own.

    Raises:
        TypeError: If they are not a dictionary with texts as keys.
        ValueError: If they hold what ``torch.load(weights_only=True)`` does not read.
    """
    torch = require("torch", extra="torch", purpose="checkpoint.save()")
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"save(per_rank=…): expected a dictionary with str keys, not {type(values).__name__}")
    values = dict(values)
    for place, kind in unreadable(values):
        raise ValueError(
            f"save(per_rank=…){place} is a {kind}: expected tensors, numbers, strings, lists and dictionaries"
        )
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def with_values(state: Any, gathered: Sequence[bytes]) -> dict[str, Any]:
    """Return a state with the values of all ranks in it.

    Raises:
        TypeError: If the state is not a dictionary.
        ValueError: If the ranks gave different keys, or the state has one of them.
    """
    torch = require("torch", extra="torch", purpose="checkpoint.save()")
    if not isinstance(state, Mapping):
        raise TypeError(f"save(state, per_rank=…): the state has to be a dictionary, not a {type(state).__name__}")
    values = [torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True) for saved in gathered]
    for rank, own in enumerate(values):
        if own.keys() != values[0].keys():
            raise ValueError(
                f"save(per_rank=…): every rank has to give the same keys, and rank 0 gave {_keys(values[0])}, rank "
                f"{rank} {_keys(own)}"
            )
    if both := sorted(state.keys() & {*values[0], PER_RANK}):
        raise ValueError(
            f"save(state, per_rank=…): the state must not have {_keys(both)}, which each rank's values are"
        )
    return {**state, PER_RANK: values}


def load_own(path: str | os.PathLike[str], rank: int, size: int, map_location: Any, *, strict: bool) -> Any:
    """Load a state, with the values of one rank in it under their own keys.

    Args:
        path: the file.
        rank: the rank.
        size: how many there are now.
        map_location: as ``torch.load`` takes it.
        strict: raise where another number of ranks has saved it; else leave those keys out.

    Raises:
        ValueError: If another number of ranks has saved it.
        CheckpointError: If the file holds what ``weights_only=True`` does not read.
    """
    torch = require("torch", extra="torch", purpose="checkpoint.load()")
    try:
        state = torch.load(Path(path), map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds {refused(e)}, which is not read, as that could run code: if you trust whoever wrote it, "
            "read it with torch.load(…, weights_only=False)"
        ) from None
    if not isinstance(state, dict) or PER_RANK not in state:
        return state
    values = state.pop(PER_RANK)
    if len(values) == size:
        state.update(values[rank])
    elif strict:
        raise ValueError(
            f"{path} was saved by {len(values)} rank(s), and {size} load it: of {_keys(values[0])} each rank has its "
            f"own. Start {len(values)} rank(s), or leave them out by ctx.checkpoint.load(path, strict=False)"
        )
    return state


def _keys(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys) or "none"
