"""How an allocation ended (wire contract, section 13.3)."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class ExitKind(str, Enum):
    """How an allocation ended; the first three are no errors and no wish of the script's."""

    KILLED = "killed"
    """The master killed it."""
    PREEMPTED = "preempted"
    """It acknowledged a preemption, or that it has no more operations, and then ended."""
    ABORTED = "aborted"
    """It ended before any process of it had started."""
    STOPPED = "stopped"
    """It ended with status 0 by itself."""
    FAILED = "failed"
    """A process of it ended with another status, or by a signal."""
    TERMINATED = "terminated"
    """A signal from outside ended it, as ``kill -9`` and want of memory do: a failure, but not of its making."""
    TRANSIENT = "transient"
    """The machine failed, not the script: it was lost, or could not be found again."""
    UNRECOVERABLE = "unrecoverable"
    """It cannot be started, and trying again would not help."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_error(self) -> bool:
        """Whether it counts as an error."""
        return self in (ExitKind.FAILED, ExitKind.UNRECOVERABLE) or self.from_outside

    @property
    def from_outside(self) -> bool:
        """Whether something ended it that says nothing of the script."""
        return self in (ExitKind.TERMINATED, ExitKind.TRANSIENT)


OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that others send; the rest come from what a program does itself."""


class Failure(str, Enum):
    """What went wrong with an allocation outside its processes."""

    LOST = "lost"
    """The machine, or the supervisor that watched the processes, is gone, and nobody knows how they ended."""
    NOT_RESTORED = "not restored"
    """A master that was started again did not find it."""
    NOT_STARTED = "not started"
    """The engine could not start it this time, by a fault of the machine."""
    REFUSED = "refused"
    """The engine refuses to start it as it is asked for: a context that cannot be unpacked, say."""


@dataclass(frozen=True)
class ProcessExit:
    """How a process (or container) of an allocation ended: by status, or by signal."""

    status: int | None = None
    signal: int | None = None
    daemon: bool = False
    """Whether it is a helper, which is only there for the others."""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with status 0."""
        return self.status != 0 or self.signal is not None

    @property
    def terminated(self) -> bool:
        """Whether somebody else ended it."""
        return self.signal in OUTSIDE


@dataclass(frozen=True)
class ExitFacts:
    """What is known of an allocation that has ended."""

    killed: bool = False
    """The master killed it while it was running: a kill, or a pause or cancel of one that was not ready or took longer
    than its preemption timeout."""
    acked: bool = False
    """The script acknowledged a preemption or the end of its operations."""
    preemptible: bool = True
    exits: Sequence[ProcessExit] = ()
    """Of the processes that were started."""
    failure: Failure | None = None


def classify(facts: ExitFacts) -> ExitKind:
    """Say how an allocation ended; the first row of the table that fits."""
    if facts.killed:
        return ExitKind.KILLED
    if facts.preemptible and facts.acked:
        return ExitKind.PREEMPTED
    if facts.failure is Failure.REFUSED:
        return ExitKind.UNRECOVERABLE
    if facts.failure is not None:
        return ExitKind.TRANSIENT
    if not facts.exits:
        return ExitKind.ABORTED
    workers = [e for e in facts.exits if not e.daemon]
    if workers and not any(e.failed for e in workers):
        return ExitKind.STOPPED  # whatever became of its helpers
    failed = [e for e in facts.exits if e.failed]
    if not failed:
        return ExitKind.STOPPED
    return ExitKind.TERMINATED if all(e.terminated for e in failed) else ExitKind.FAILED
