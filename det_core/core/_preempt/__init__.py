"""When to stop: asked for by a signal or a master, agreed on by all ranks."""

from det_core.core._preempt._context import PreemptContext, PreemptMode
from det_core.core._preempt._term import EndSafely

__all__ = ["EndSafely", "PreemptContext", "PreemptMode"]
