"""The metadata of a checkpoint: what it may hold, and how the ranks' parts of it become one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from det_core.errors import CheckpointConflict

_SIMPLE = {str, int, float, bool, type(None)}
HOW = 'pass metadata={"steps_completed": N, ...}, N being the batches (or what else you count) trained so far'


def plain_metadata(metadata: object) -> dict[str, Any]:
    """A copy of ``metadata`` in which only JSON's types are left; scalars of numpy and torch become numbers.

    Raises:
        ValueError: it is no dictionary, or holds what JSON cannot; the message has the path of the key.
    """
    if (
        type(metadata) is dict
        and _SIMPLE.issuperset(map(type, metadata.values()))
        and set(map(type, metadata)) == {str}
    ):
        return metadata.copy()
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be a dictionary, not {type(metadata).__name__}: {HOW}")
    plain = _plain(metadata, "")
    assert isinstance(plain, dict)
    return plain


def check_steps(metadata: Mapping[str, Any]) -> int:
    """Return ``metadata["steps_completed"]``.

    Raises:
        ValueError: it is missing, or is no integer of at least 0.
    """
    if "steps_completed" not in metadata:
        raise ValueError(f"metadata has no 'steps_completed': {HOW}")
    steps = metadata["steps_completed"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"metadata['steps_completed'] is {steps!r}: it must be an integer of at least 0")
    return steps


def merge_metadata(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks (by rank): dictionaries key by key, anything else must be equal.

    Raises:
        CheckpointConflict: two ranks give one key different values; the message has keys (as ``/a/b``) and ranks.
    """
    merged: dict[str, Any] = {}
    conflicts: dict[str, set[int]] = {}
    _merge(merged, [(rank, part) for rank, part in enumerate(parts)], "", conflicts)
    if conflicts:
        found = "; ".join(f"{key} (ranks {', '.join(map(str, sorted(r)))})" for key, r in sorted(conflicts.items()))
        raise CheckpointConflict(f"refusing to store a checkpoint with metadata conflicts: ranks disagree on {found}")
    return merged


def _merge(
    into: dict[str, Any], parts: Sequence[tuple[int, Mapping[str, Any]]], path: str, conflicts: dict[str, set[int]]
) -> None:
    given: dict[str, list[tuple[int, Any]]] = {}
    for rank, part in parts:
        for key, value in part.items():
            given.setdefault(key, []).append((rank, value))
    for key, values in given.items():
        if all(isinstance(value, dict) for _, value in values):
            _merge(into.setdefault(key, {}), values, f"{path}/{key}", conflicts)
        elif all(_same(value, values[0][1]) for _, value in values):
            into[key] = values[0][1]
        else:
            conflicts[f"{path}/{key}"] = {rank for rank, _ in values}


def _same(a: object, b: object) -> bool:
    """Equal as JSON: 1 is not true, and NaN is NaN."""
    return repr(a) == repr(b)


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}/{i}") for i, item in enumerate(value)]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item(), path)
    if hasattr(value, "__index__"):
        return operator.index(value)
    raise ValueError(f"metadata holds a {type(value).__name__} at {path or '/'}, which JSON cannot hold")


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"metadata has the key {key!r} at {path or '/'}: keys must be strings")
    return key
