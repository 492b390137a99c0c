"""States of torch that ``torch.load(weights_only=True)`` reads back, without running code."""

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
    """Yield the parts of a state that ``torch.load(weights_only=True)`` will not read.

    Returns:
        The place of each, such as ``['ema']['decay']``, and its type.
    """
    for place, value in _odd_leaves(state, ""):
        # Tensors of torch's own kinds can be as large as the whole state, and torch reads them.
        if not type(value).__module__.startswith("torch.") and why_unreadable(value):
            yield place, f"{type(value).__module__}.{type(value).__qualname__}"


def why_unreadable(state: Any, load: Callable[[IO[bytes]], Any] | None = None) -> str:
    """Return the reason for which a state cannot be read back, or an empty text.

    Args:
        state: State to save.
        load: Reads the output of ``torch.save()``, as a resume does. Defaults to ``torch.load(weights_only=True)``.
    """
    torch = importlib.import_module("torch")
    # A large one, such as a model's average, is not written twice.
    if is_plain(state):
        return ""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        if load is None:
            torch.load(file, weights_only=True)
        else:
            load(file)
    except Exception as e:  # a user's object may raise anything while it is pickled
        cause = e.__cause__ or e
        if isinstance(cause, pickle.UnpicklingError):
            return refused(cause)
        return str(cause).partition("\n")[0]
    return ""


def refused(error: BaseException | None) -> str:
    """Return the type that torch rejected in a pickle, from the text of its error."""
    # The text is of many lines, and colored.
    match = re.search(r"GLOBAL (\S+)", str(error))
    if match is None:
        return "a pickle of another kind"
    return match.group(1).rstrip(".,")


def _odd_leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield all values except plain ones and torch's tensors, with their places."""
    # By exact type: a number of numpy is a float as well, and its pickle is rejected, as is a subclass's of a tensor.
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
