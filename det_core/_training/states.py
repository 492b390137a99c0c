"""States that a checkpoint can hold: what ``torch.load(weights_only=True)`` reads again, which runs no code."""

from __future__ import annotations

import io
import logging
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch

from det_core.errors import CheckpointError


def is_plain(value: Any) -> bool:
    """Return whether a state holds nothing but tensors, numbers, strings, lists, tuples, sets and dictionaries."""
    if type(value) in (dict, OrderedDict, Counter):
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    # by type: a number of numpy's is a float as well, and its pickle is refused, as is that of a user's kind of tensor
    plain = (torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, type(None))
    return type(value) in plain


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
        reason = _why_unreadable(state, load)
        if not reason:
            kept[name] = state
        elif name not in warned:
            warned.add(name)
            log.warning(
                "the state of %s %r is not part of checkpoints, as it could not be read back (%s): keep to tensors, "
                "numbers, strings, lists and dictionaries", kind, name, reason,
            )  # fmt: skip
    return kept


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


def refused(error: BaseException | None) -> str:
    """Return what torch found in a pickle, out of its text, which is long and coloured."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found.group(1).rstrip(".,") if found else "a pickle of another kind"


def _why_unreadable(state: Any, load: Callable[[IO[bytes]], Any]) -> str:
    """Return what stands against reading a state back, or nothing."""
    if is_plain(state):  # so that a large one, such as a model's average, is not written twice
        return ""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        load(file)
    except Exception as e:  # an object of the user's may raise anything while it is pickled
        cause = e.__cause__ or e
        return refused(cause) if isinstance(cause, pickle.UnpicklingError) else str(cause).partition("\n")[0]
    return ""
