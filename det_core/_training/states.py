"""States that a checkpoint can hold: what ``torch.load(weights_only=True)`` reads again, which runs no code."""

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
"""In the place of a part that a checkpoint cannot hold."""
_MISSING = object()
_T = TypeVar("_T")


def readable_states(
    kind: str, states: Mapping[str, Any], load: Callable[[IO[bytes]], Any], log: logging.Logger, warned: set[str]
) -> dict[str, Any]:
    """Return the states that can be read back from a checkpoint, without those that would make it unreadable.

    Args:
        kind: what has a state, for the warning.
        states: states by the name of their owner.
        load: reads what ``torch.save()`` has written, as a resume does.
        log: logger of a warning that names an owner whose state is left out.
        warned: owners that were named before; extended.
    """
    kept = {}
    for name, state in states.items():
        reason = why_unreadable(state, load)
        if not reason:
            kept[name] = state
        elif name not in warned:
            warned.add(name)
            log.warning(
                "the state of %s %r is not part of checkpoints, as it could not be read back (%s): keep to tensors, "
                "numbers, strings, lists and dictionaries", kind, name, reason,
            )  # fmt: skip
    return kept


def without_unreadable(
    state: Mapping[str, Any], load: Callable[[IO[bytes]], Any], log: logging.Logger, warned: set[str]
) -> dict[str, Any]:
    """Return a state that can be read back: what cannot is marked, at any depth, for :func:`completed` to fill in.

    A scheduler with a lambda among its attributes keeps its numbers; a resume takes the lambda from the new scheduler.

    Args:
        state: states by name, each of one object, or a list with those of several.
        load: reads what ``torch.save()`` has written, as a resume does.
        log: logger of a warning that names what is left out, once an object.
        warned: objects that were named before; extended.
    """
    reasons: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Any] = _marked(dict(state), (), load, reasons)
    named: dict[str, list[tuple[Any, ...]]] = {}
    for path in reasons:
        named.setdefault(_dotted(path[:2]), []).append(path)
    for owner in named.keys() - warned:
        warned.add(owner)
        log.warning(
            "checkpoints leave out %s, as it could not be read back (%s): a resume takes it from the object that the "
            "script makes anew. What is to be saved has to be tensors, numbers, strings, lists and dictionaries",
            ", ".join(map(_dotted, named[owner])), reasons[named[owner][0]],
        )  # fmt: skip
    return kept


def completed(saved: _T, current: Callable[[], Any]) -> _T:
    """Return a saved state with the parts that :func:`without_unreadable` left out as they are in a current one.

    Args:
        saved: the state, of which a part that the current one lacks is dropped.
        current: makes the current state; called if a part was left out.
    """
    if _has_mark(saved):
        filled: _T = _filled(saved, current())
        return filled
    return saved


@contextmanager
def naming_damage(path: Any) -> Iterator[None]:
    """Say which file it is while torch reads one, whose errors do not.

    Raises:
        CheckpointError: If the file is damaged.
        pickle.UnpicklingError: If it holds what ``weights_only`` refuses.
        OSError: If it cannot be opened.
    """
    try:
        yield
    except pickle.UnpicklingError:
        raise
    except Exception as e:  # flipped bits let torch raise nearly anything, an OSError of a seek before the file too
        if isinstance(e, OSError) and e.filename is not None:
            raise
        raise CheckpointError(f"{path} is damaged or of another kind: {type(e).__name__}: {e}") from e


def _marked(value: Any, path: tuple[Any, ...], load: Callable[[IO[bytes]], Any], reasons: dict[Any, str]) -> Any:
    """Return a value with marks in place of its unreadable parts, whose paths and reasons are collected."""
    if is_plain(value):
        return value
    if type(value) in (dict, OrderedDict) and is_plain(list(value)):
        marked = copy.copy(value)  # with the attributes that torch gives to a model's state
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
    """Return a saved value with its marks replaced; :data:`_MISSING` if it is a mark and the current one lacks it."""
    if not _has_mark(saved):
        return saved
    if isinstance(saved, dict):
        filled = copy.copy(saved)
        for key, part in saved.items():
            filled[key] = _filled(part, current.get(key, _MISSING) if isinstance(current, Mapping) else _MISSING)
            if filled[key] is _MISSING:
                del filled[key]
        return filled
    if isinstance(saved, list | tuple):
        parts = current if isinstance(current, list | tuple) and len(current) == len(saved) else [_MISSING] * len(saved)
        items = [_filled(part, now) for part, now in zip(saved, parts, strict=True)]
        return type(saved)(None if item is _MISSING else item for item in items)
    return current


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
