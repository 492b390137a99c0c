"""The signals that ask a training to save and exit: scripts understand them, and launchers pass them on.

SIGQUIT is not among them: it ends a process at once, with a core dump where those are enabled.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

SAME_INTERRUPT = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C, delivered once more by a launcher."""


def is_worker_loss(error: BaseException | None) -> bool:
    """Return whether torch raises this error because a worker of a DataLoader has died, as of such a signal."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
