"""States of torch that are read back without running code: what ``torch.load(weights_only=True)`` takes."""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Any

_PLAIN = frozenset([int, float, complex, bool, str, bytes, type(None)])
_MAPPINGS = frozenset([dict, OrderedDict, Counter])
_SEQUENCES = frozenset([list, tuple, set])


def is_plain(value: Any) -> bool:
    """Return whether a state holds nothing but tensors, numbers, strings, lists, tuples, sets and dictionaries."""
    return next(_odd_leaves(value, ""), None) is None


def unreadable(state: Any) -> Iterator[tuple[str, str]]:
    """Yield what in a state ``torch.load(weights_only=True)`` will not read.

    Returns:
        The place of each, as in ``['ema']['decay']``, and its type.
    """
    for place, value in _odd_leaves(state, ""):
        # Tensors of torch's own kinds can be as large as the whole state, and torch reads them.
        if not type(value).__module__.startswith("torch.") and why_unreadable(value):
            yield place, f"{type(value).__module__}.{type(value).__qualname__}"


def why_unreadable(state: Any, load: Callable[[IO[bytes]], Any] | None = None) -> str:
    """Return what stands against reading a state back, or nothing.

    Args:
        state: what is to be saved.
        load: reads what ``torch.save()`` has written, as a resume does. Defaults to ``torch.load(weights_only=True)``.
    """
    torch = importlib.import_module("torch")
    if is_plain(state):  # so that a large one, such as a model's average, is not written twice
        return ""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True) if load is None else load(file)
    except Exception as e:  # an object of the user's may raise anything while it is pickled
        cause = e.__cause__ or e
        return refused(cause) if isinstance(cause, pickle.UnpicklingError) else str(cause).partition("\n")[0]
    return ""


def refused(error: BaseException | None) -> str:
    """Return what torch found in a pickle, out of its text, which is long and coloured."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found.group(1).rstrip(".,") if found else "a pickle of another kind"


def _odd_leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield all but plain values and torch's tensors, with their places.

    By type: a number of numpy's is a float as well, and its pickle is refused, as is that of a user's kind of tensor.
    """
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind in _MAPPINGS:
        for key, item in value.items():
            yield from _odd_leaves(key, f"{place}, key {key!r}")
            yield from _odd_leaves(item, f"{place}[{key!r}]")
    elif kind in _SEQUENCES:
        for number, item in enumerate(value):
            yield from _odd_leaves(item, f"{place}[{number}]")
    else:
        torch = importlib.import_module("torch")
        if kind not in (torch.Tensor, torch.nn.Parameter):
            yield place, value
