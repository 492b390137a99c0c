"""Errors of a loader that come with a stop: the trainers save what they have, and do not fail.

A signal to all processes of a job may kill a worker that is still starting. The loader then raises between two batches,
where everything that a checkpoint needs is there.
"""

from __future__ import annotations

import time
from typing import Protocol

from det_core import _clock
from det_core._standalone.stop_signals import is_worker_loss

_SIGNAL_TIMEOUT = 1.0
"""Seconds in which the signal that has killed a worker reaches this process too."""
_POLL_INTERVAL = 0.01


class StopRequests(Protocol):
    """The part of a ``PreemptContext`` that says whether a stop is pending."""

    @property
    def requested(self) -> bool:
        """Whether it is."""


def comes_with_stop(error: Exception, preempt: StopRequests) -> bool:
    """Return whether a stop is pending by the time of a loader's error; wait for it if a worker has died."""
    # EOFError and ConnectionError: a child of forkserver or spawn died before it had read what it is to do.
    may_be_signal = is_worker_loss(error) or isinstance(error, EOFError | ConnectionError)
    deadline = _clock.monotonic() + _SIGNAL_TIMEOUT
    while may_be_signal and not preempt.requested and _clock.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
    return preempt.requested
