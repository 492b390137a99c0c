"""The decision after each job of a chain: whether the next one goes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from det_core.slurm._commands import CANCELLED, PREEMPTION

NOT_BEGUN = "not begun"
"""State of the run after a job whose script never started it."""
LOST = "lost"
"""Cause of an end that the job could not record: its node died, or its program was killed."""
MAX_STALLED = 3
"""Jobs in a row without a newer checkpoint, after which a chain ends."""
MAX_SAME_FAILURES = 2
"""Equal failures in a row without a newer checkpoint, after which a chain ends."""


@dataclass(frozen=True)
class JobEnd:
    """End of a job of a chain.

    Attributes:
        state: the run's, or :data:`NOT_BEGUN`; ``running`` where another process holds the run's lock.
        status: exit status of the script, negative for a signal; None if the job could not record it.
        stop: why the script was asked to stop; empty: it was not.
        is_newer: whether it left a checkpoint newer than those before.
        error: what the run says of its failure.
    """

    state: str
    status: int | None
    stop: str = ""
    is_newer: bool = False
    error: str = ""

    @property
    def is_own_failure(self) -> bool:
        """Whether the script failed by itself: neither after a stop request, nor by a signal, nor for want of the lock.

        A launcher or a shell reports a signal as a status from 128 on.
        """
        if self.stop or self.status is None or not 0 <= self.status < 128:
            return False
        if self.status == 0:
            return self.state == "failed"
        return self.state not in ("completed", "preempted", "interrupted", "running")

    @property
    def failure(self) -> str:
        """Description of the failure."""
        return f"status {self.status}" + (f": {self.error}" if self.error else "")


@dataclass(frozen=True)
class ChainEnd:
    """The end of a chain.

    Attributes:
        outcome: ``done``, ``failed``, ``cancelled`` or ``unfinished``.
        reason: empty where the outcome says all.
    """

    outcome: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} ({self.reason})" if self.reason else self.outcome


def decide(ends: Sequence[JobEnd], max_jobs: int) -> ChainEnd | None:
    """Return how a chain ends after these jobs, oldest first; None if the next job goes on."""
    if not ends:
        return None
    last = ends[-1]
    if last.state == "completed":
        return ChainEnd("done")
    if last.stop == CANCELLED:
        return ChainEnd("cancelled")
    if last.is_own_failure:
        if not any(end.is_newer for end in ends):
            return ChainEnd("failed", f"{last.failure}; no checkpoint to go on from")
        if _is_repeated(ends):
            return ChainEnd("failed", f"{last.failure}; {MAX_SAME_FAILURES} times in a row without a newer checkpoint")
    elif last.status == 0 and not last.stop and last.state not in ("preempted", "interrupted", "running"):
        return ChainEnd("done", "the script began no run" if last.state == NOT_BEGUN else last.state)
    if _count_stalled(ends) >= MAX_STALLED:
        return ChainEnd("failed", f"{MAX_STALLED} jobs in a row left no newer checkpoint")
    if len(ends) >= max_jobs:
        return ChainEnd("unfinished", f"--max-jobs {max_jobs}")
    return None


def _is_repeated(ends: Sequence[JobEnd]) -> bool:
    tail = ends[-MAX_SAME_FAILURES:]
    same = all(end.is_own_failure and not end.is_newer and end.failure == tail[0].failure for end in tail)
    return same and len(tail) == MAX_SAME_FAILURES


def _count_stalled(ends: Sequence[JobEnd]) -> int:
    """Return how many jobs ended since the newest checkpoint; preempted and lost ones may have had no time to save."""
    count = 0
    for end in reversed(ends):
        if end.is_newer:
            break
        count += end.stop not in (PREEMPTION, LOST)
    return count
