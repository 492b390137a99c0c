"""Content of checkpoints: what differs between two of them, and which kinds of state one holds."""

from __future__ import annotations

import filecmp
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from det_core.check_resume._compare import is_close, is_time
from det_core.check_resume._fingerprint import bytes_of
from det_core.check_resume._records import join_path

METADATA = "metadata.json"
INTERNAL = ".det_core"
NUMBERS_OF_PYTHON = 625
"""Numbers in the state of Python's generator."""
RNG_BYTES = 5056
"""Bytes of the state of torch's generator for the CPU."""


def different_keys(expected: Path, found: Path, rtol: float = 0.0) -> list[str]:
    """Return what differs between two checkpoints: paths of files, and within those of torch paths of keys."""
    before = _files(expected)
    after = _files(found)
    differ = [f"{name} (missing)" for name in before.keys() - after.keys()]
    differ += [f"{name} (new)" for name in after.keys() - before.keys()]
    for name in sorted(before.keys() & after.keys()):
        if filecmp.cmp(before[name], after[name], shallow=False):
            continue
        states = _load(before[name]), _load(after[name])
        if any(state is None for state in states):
            differ.append(name)
            continue
        leaves = [dict(_leaves(state)) for state in states]
        differ += [
            f"{name}: {key}"
            for key in {**leaves[0], **leaves[1]}
            if not is_time(key)
            and not (key in leaves[0] and key in leaves[1] and _is_same(leaves[0][key], leaves[1][key], rtol))
        ]
    return differ


def held_kinds(checkpoint: Path) -> dict[str, str]:
    """Return the kinds of state that a checkpoint holds, by their shapes, with the path of each."""
    kinds: dict[str, str] = {}
    for path in _files(checkpoint).values():
        state = _load(path)
        if state is not None:
            for kind, where in _kinds(state, ""):
                kinds.setdefault(kind, where)
    return kinds


def top_keys(checkpoint: Path) -> list[str]:
    """Return the keys of the dictionaries that the files of a checkpoint hold."""
    states = [_load(path) for path in _files(checkpoint).values()]
    return [str(key) for state in states if isinstance(state, Mapping) for key in state]


def _files(checkpoint: Path) -> dict[str, Path]:
    found = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name != METADATA and not name.startswith(f"{INTERNAL}/")}


def _load(path: Path) -> Any:
    """Return the state in a file of torch's; None for any other, and one that holds more than data."""
    if not zipfile.is_zipfile(path):
        return None
    with suppress(Exception):  # no torch, another zip file, objects: its bytes are compared
        import torch

        return torch.load(path, map_location="cpu", weights_only=True)
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, join_path(path, key))
    elif isinstance(value, list | tuple) and len(value) < NUMBERS_OF_PYTHON - 1:
        for number, item in enumerate(value):
            yield from _leaves(item, join_path(path, number))
    else:
        yield path, value


def _is_same(a: Any, b: Any, rtol: float) -> bool:
    torch = sys.modules["torch"]
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if type(a) is not type(b):
            return False
        if isinstance(a, tuple):  # is_close() compares values of JSON, which has no tuples
            return bool(is_close(list(a), list(b), rtol))
        return bool(is_close(a, b, rtol))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if rtol and a.is_floating_point():
        return bool(torch.allclose(a, b, rtol=rtol, atol=0.0, equal_nan=True))
    return bool(bytes_of(a) == bytes_of(b))


def _kinds(value: Any, path: str) -> Iterator[tuple[str, str]]:
    torch = sys.modules["torch"]
    if isinstance(value, Mapping):
        keys = {str(key) for key in value}
        if {"state", "param_groups"} <= keys:
            yield "optimizer", path
        elif "last_epoch" in keys or "_step_count" in keys:
            yield "scheduler", path
        elif {"scale", "growth_factor"} <= keys:
            yield "scaler", path
        elif keys and all(isinstance(item, torch.Tensor) for item in value.values()):
            if "ema" in path.lower():
                yield "copy", path
            else:
                yield "model", path
        else:
            for key, item in value.items():
                yield from _kinds(item, join_path(path, key))
    elif isinstance(value, torch.Tensor):
        if value.dtype == torch.uint8 and value.numel() == RNG_BYTES:
            yield "random", path
    elif isinstance(value, list | tuple):
        if len(value) in (NUMBERS_OF_PYTHON - 1, NUMBERS_OF_PYTHON):
            yield "random", path
        elif len(value) < NUMBERS_OF_PYTHON - 1:
            for number, item in enumerate(value):
                yield from _kinds(item, join_path(path, number))
