"""Which garbage is looked for while a search is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

NEVER = 2**31 - 1
"""So many collections of middle-aged objects that those of the old ones never come."""

_lock = Lock()
_inside = 0
_before = (0, 0, 0)


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Let Python look for cycles of young and middle-aged objects only, in the whole process.

    It lasts until all who asked for it have left. A search makes no cycles, and what it makes it keeps: to look
    through all of it again and again finds nothing, and costs more the more trials there are. What others make
    meanwhile is collected while it is young; cycles that got old are collected afterwards. A Python whose collector
    knows no such ages goes on as it does.
    """
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(_before[0], _before[1], NEVER)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)
