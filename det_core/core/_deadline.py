"""The moment until which a process that is to stop may wait for a checkpoint store."""

from __future__ import annotations

from collections.abc import Callable

from det_core import _clock

GRACE = 60.0
"""The grace period in seconds where nobody has set one."""
MIN_TIME = 5.0
"""Seconds that a save gets at least: the grace may be over by the time the script comes to it."""
END_TIME = 3.0
"""Seconds of the grace period that are kept for what comes after checkpoints; less of a short one."""


class StopDeadline:
    """Until when a preempted process may wait for a store, on the monotonic clock, when called; None: no limit yet.

    Progress does not move it: a store may trickle for ever. Time in the script's own code is not counted against the
    store: where nobody has set a grace period, it begins when a store is first waited for.

    Args:
        requested_at: when this rank first heard that it is preempted; None: not yet.
        grace: ``DET_CORE_GRACE``; None: not set.
        is_limited: whether there is a limit where it is not set.
    """

    def __init__(
        self, requested_at: Callable[[], float | None], grace: float | None, *, is_limited: bool = True
    ) -> None:
        self._requested_at = requested_at
        self._grace = grace
        self._is_limited = is_limited
        self._until: float | None = None

    def __call__(self) -> float | None:
        requested_at = self._requested_at()
        if requested_at is None or (self._grace is None and not self._is_limited):
            return None
        if self._until is None:
            now = _clock.monotonic()
            if self._grace is None:
                self._until = now + GRACE - END_TIME
            else:
                end_time = min(END_TIME, self._grace / 3)
                self._until = max(requested_at + self._grace - end_time, now + min(MIN_TIME, self._grace / 2))
        return self._until
