"""Name of the core API call in which a script is, for messages to other ranks."""

from __future__ import annotations

import sys
from types import FrameType

_THREADS = ("threading", "concurrent.futures")
"""Modules that call the first function of a thread."""


def script_call() -> str:
    """Return the core API call in which the script of this thread is, such as "checkpoint.resume()", or "".

    In internal threads it is "": they work for calls that have returned.
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
    """Return the public name of a function: a method of a context or a function of core; "" for internal ones."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        if name.startswith(("_", "<")):
            return ""
        return f"core.{name}"
    owner = type(frame.f_locals["self"]).__name__
    if owner == "Context" and name in ("__exit__", "close"):
        return "core.Context.close"
    if owner.startswith("_") or name.startswith(("_", "<")):
        return ""
    if owner.endswith("Context"):
        owner = owner.removesuffix("Context").lower()
    return f"{owner}.{name}"
