"""Restrict states to what ``torch.load(weights_only=True)`` reads without running code."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, TypeVar

from det_core._torch_states import is_plain, why_unreadable
from det_core.errors import CheckpointError

_LEFT_OUT = "left out by det_core, as it could not be read back"
"""Placeholder of a part that could not be read back."""
_MISSING = object()
_T = TypeVar("_T")


def readable_states(
    kind: str, states: Mapping[str, Any], load: Callable[[IO[bytes]], Any], log: logging.Logger, warned: set[str]
) -> dict[str, Any]:
    """Return the states that can be read back from a checkpoint.

    Args:
        kind: kind of the owners, for the warning.
        states: states by the name of their owner.
        load: function that loads a file of ``torch.save()``, as a resume does.
        log: logger of a warning for each state left out.
        warned: names of owners with a warning before; extended.
    """
    kept = {}
    for name, state in states.items():
        reason = why_unreadable(state, load)
        if not reason:
            kept[name] = state
        elif name not in warned:
            warned.add(name)
            log.warning(
                "leaving the state of %s %r out of checkpoints, as it could not be read back (%s): use tensors, "
                "numbers, strings, lists and dictionaries", kind, name, reason,
            )  # fmt: skip
    return kept


def without_unreadable(
    state: Mapping[str, Any], load: Callable[[IO[bytes]], Any], log: logging.Logger, warned: set[str]
) -> dict[str, Any]:
    """Return a state with placeholders for parts that could not be read back, which :func:`completed` fills in.

    A scheduler with a lambda among its attributes keeps its numbers; a resume takes the lambda from the new scheduler.

    Args:
        state: states by name, each of one object, or a list with those of several.
        load: function that loads a file of ``torch.save()``, as a resume does.
        log: logger of one warning for each object with parts left out.
        warned: names of objects with a warning before; extended.
    """
    reasons: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Any] = _marked(dict(state), (), load, reasons)
    named: dict[str, list[tuple[Any, ...]]] = {}
    for path in reasons:
        named.setdefault(_dotted(path[:2]), []).append(path)
    for owner in named.keys() - warned:
        warned.add(owner)
        log.warning(
            "leaving %s out of checkpoints, as it could not be read back (%s): a resume takes it from the new object. "
            "States should have tensors, numbers, strings, lists and dictionaries",
            ", ".join(map(_dotted, named[owner])), reasons[named[owner][0]],
        )  # fmt: skip
    return kept


def completed(saved: _T, current: Callable[[], Any]) -> _T:
    """Return a saved state with the parts that :func:`without_unreadable` left out taken from a current one.

    Args:
        saved: the saved state; parts that the current state lacks are dropped.
        current: function that makes the current state, called if a part is left out.
    """
    if _has_mark(saved):
        filled: _T = _filled(saved, current())
        return filled
    return saved


@contextmanager
def naming_damage(path: Any) -> Iterator[None]:
    """Add the name of the file to errors of torch while it reads one.

    Raises:
        CheckpointError: If the file is damaged.
        pickle.UnpicklingError: If ``weights_only`` rejects its content.
        OSError: If it cannot be opened.
    """
    try:
        yield
    except pickle.UnpicklingError:
        raise
    except Exception as e:  # after a flipped bit, torch raises nearly anything, such as the OSError of a negative seek
        if isinstance(e, OSError) and e.filename is not None:
            raise
        raise CheckpointError(f"{path} is damaged or of another kind: {type(e).__name__}: {e}") from e


def _marked(value: Any, path: tuple[Any, ...], load: Callable[[IO[bytes]], Any], reasons: dict[Any, str]) -> Any:
    """Return a value with placeholders for unreadable parts, and collect their paths and reasons."""
    if is_plain(value):
        return value
    if type(value) in (dict, OrderedDict) and is_plain(list(value)):
        marked = copy.copy(value)  # keeps the attributes of a model's state, such as _metadata
        for key, part in value.items():
            marked[key] = _marked(part, (*path, key), load, reasons)
        return marked
    if type(value) in (list, tuple):
        return type(value)(_marked(part, (*path, i), load, reasons) for i, part in enumerate(value))
    reason = why_unreadable(value, load)
    if not reason:
        return value
    reasons[path] = reason
    return _LEFT_OUT


def _has_mark(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_mark, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_mark, value))
    return type(value) is str and value == _LEFT_OUT


def _filled(saved: Any, current: Any) -> Any:
    """Return a saved value with its placeholders replaced, or :data:`_MISSING` if the current one lacks it."""
    if not _has_mark(saved):
        return saved
    if isinstance(saved, dict):
        filled = copy.copy(saved)
        for key, part in saved.items():
            now = _MISSING
            if isinstance(current, Mapping):
                now = current.get(key, _MISSING)
            filled[key] = _filled(part, now)
            if filled[key] is _MISSING:
                del filled[key]
        return filled
    if isinstance(saved, list | tuple):
        parts: Any = [_MISSING] * len(saved)
        if isinstance(current, list | tuple) and len(current) == len(saved):
            parts = current
        items = [_filled(part, now) for part, now in zip(saved, parts, strict=True)]
        for i, item in enumerate(items):
            if item is _MISSING:
                items[i] = None  # keeps the indices of the others
        return type(saved)(items)
    return current


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
