"""The call of the core API that a script is in, for messages that name it to other ranks."""

from __future__ import annotations

import sys
from types import FrameType

_THREADS = ("threading", "concurrent.futures")
"""Modules below the first function of a thread."""


def script_call() -> str:
    """Return the call of the core API that this thread's script is in, as in "checkpoint.resume()".

    Empty: in none, as in a thread of our own, which works for calls that have returned.
    """
    frame: FrameType | None = sys._getframe(1)
    outermost = caller = None
    name = ""
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith("det_core.core."):
            outermost = frame
            name = _public_name(frame) or name
        frame = frame.f_back
    if outermost is not None:
        caller = outermost.f_back
    if caller is None or caller.f_globals.get("__name__", "").startswith(_THREADS):
        return ""
    return name and f"{name}()"


def _public_name(frame: FrameType) -> str:
    """Return the name of a function as users know it: a context's method or core's own; empty: it is internal."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        return "" if name.startswith(("_", "<")) else f"core.{name}"
    owner = type(frame.f_locals["self"]).__name__
    if owner == "Context" and name in ("__exit__", "close"):
        return "core.Context.close"
    if owner.startswith("_") or name.startswith(("_", "<")):
        return ""
    if owner.endswith("Context"):
        owner = owner.removesuffix("Context").lower()
    return f"{owner}.{name}"
