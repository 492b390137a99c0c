"""The decision after each job of a chain: whether the next one goes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from det_core.slurm._commands import CANCELLED, PREEMPTION

NOT_BEGUN = "before core.init()"
"""State of the run after a job whose script never started it."""
LOST = "lost"
"""Cause of an end that the job could not record: its node died, or its program was killed."""
MAX_STALLED = 3
"""Jobs in a row without a newer checkpoint, after which a chain ends."""
_UNCOUNTED = (PREEMPTION, LOST, "node fail")
"""Beginnings of the causes that may leave no time to save."""
_GOES_ON = ("preempted", "interrupted", "running")


@dataclass
class JobRecord:
    """Record of one job of a chain.

    Attributes:
        state: the run's after it, or :data:`NOT_BEGUN`; ``running`` where another process holds the run's lock; empty
            until the job has ended.
        status: exit status of the script, negative for a signal; None if the job could not record it.
        stop: why the script was asked to stop; empty: it was not.
        is_newer: whether it left a checkpoint newer than those before.
        error: what the run says of its failure.
        job: Slurm's ID.
        host: the node of its program.
        started, ended: times in seconds since the epoch.
        starts: starts of the run up to its end.
        checkpoint: newest checkpoint at its end.
    """

    state: str = ""
    status: int | None = None
    stop: str = ""
    is_newer: bool = False
    error: str = ""
    job: str = ""
    host: str = ""
    started: float = 0.0
    ended: float | None = None
    starts: int = 0
    checkpoint: str | None = None

    @property
    def failure(self) -> str:
        """The script's own failure: neither after a stop, nor by a signal, nor for want of the lock; empty: none."""
        # A launcher or a shell reports a signal as a status from 128 on.
        if self.stop or self.status is None or not 0 <= self.status < 128:
            return ""
        if self.state in ("completed", *_GOES_ON) or (self.status == 0 and self.state != "failed"):
            return ""
        return f"status {self.status}: {self.error}".removesuffix(": ")


def decide(jobs: Sequence[JobRecord], max_jobs: int) -> str:
    """Return how a chain ends after these jobs, oldest first; empty if the next job goes on.

    Returns:
        ``done``, ``failed``, ``cancelled`` or ``unfinished``, with the reason in brackets where that does not say all.
    """
    if not jobs:
        return ""
    last = jobs[-1]
    stalled = list(takewhile(lambda job: not job.is_newer, reversed(jobs)))
    if last.state == "completed":
        return "done"
    if last.stop == CANCELLED:
        return CANCELLED
    if last.failure and len(stalled) == len(jobs):
        return f"failed ({last.failure}; before the chain's first checkpoint)"
    if last.failure and [job.failure for job in stalled[:2]] == [last.failure] * 2:
        return f"failed ({last.failure}; 2 times in a row without a newer checkpoint)"
    if last.status == 0 and not last.failure and not last.stop and last.state not in _GOES_ON:
        return f"done ({last.state})"
    if sum(not job.stop.startswith(_UNCOUNTED) for job in stalled) >= MAX_STALLED:
        return f"failed ({MAX_STALLED} jobs in a row left no newer checkpoint)"
    if len(jobs) >= max_jobs:
        return f"unfinished (--max-jobs {max_jobs})"
    return ""
