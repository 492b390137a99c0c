"""Deadline until which a process that must stop may wait for a checkpoint store."""

from __future__ import annotations

from collections.abc import Callable

from det_core import _clock

GRACE = 60.0
"""Default grace period in seconds."""
MIN_TIME = 5.0
"""Minimum time for a save, in seconds: the grace period may be over by the time the script comes to it."""
END_TIME = 3.0
"""Seconds of the grace period that are reserved for the end of the process after checkpoints; less of a short one."""


class StopDeadline:
    """Deadline of a preempted process for its store. A call returns it on the monotonic clock, or None without a limit.

    Progress does not move it: a store may trickle for ever.

    Args:
        requested_at: returns the time at which this rank learned of its preemption, or None.
        grace: grace period in seconds (``DET_CORE_GRACE``), or None if unset.
        is_limited: whether there is a deadline if the grace period is unset.
    """

    def __init__(
        self, requested_at: Callable[[], float | None], grace: float | None, *, is_limited: bool = True
    ) -> None:
        self._requested_at = requested_at
        self._grace = grace
        self._is_limited = is_limited
        self._deadline: float | None = None

    def __call__(self) -> float | None:
        requested_at = self._requested_at()
        if requested_at is None or (self._grace is None and not self._is_limited):
            return None
        if self._deadline is None:
            now = _clock.monotonic()
            if self._grace is None:
                # It starts when a store is first waited for: time in the script's own code is not the store's.
                self._deadline = now + GRACE - END_TIME
            else:
                end_time = min(END_TIME, self._grace / 3)
                self._deadline = max(requested_at + self._grace - end_time, now + min(MIN_TIME, self._grace / 2))
        return self._deadline
