"""Ends of allocations: their kind (wire contract, section 13.3), and what their trial does next (section 13.4)."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from det_core.master.scheduler._states import State

MAX_LOSSES = 5
"""Losses in a row, without a new checkpoint, that are the machine's fault alone; later ones count as failures."""
_INVALID_HP = "INVALID_HP"
_SIGNALS_OF_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that others send; a program gets the rest for what it does itself."""


class ExitKind(str, Enum):
    """Kind of an allocation's end."""

    KILLED = "killed"
    """The master killed it."""
    PREEMPTED = "preempted"
    """It acknowledged a preemption, or that it had no operation left, and then ended."""
    ABORTED = "aborted"
    """It ended before its process had started."""
    STOPPED = "stopped"
    """It exited with status 0."""
    FAILED = "failed"
    """It exited with another status, or by a signal of its own making."""
    TERMINATED = "terminated"
    """A signal from outside ended it, as ``kill -9`` and want of memory do: a failure, but not its own."""
    TRANSIENT = "transient"
    """The machine or its supervisor was lost, so that nobody knows how it ended."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_error(self) -> bool:
        """Whether it counts as an error."""
        return self in (ExitKind.FAILED, ExitKind.TERMINATED, ExitKind.TRANSIENT)


def classify(*, killed: bool, acked: bool, begun: bool, lost: bool, status: int | None, signal: int | None) -> ExitKind:
    """Return the kind of an allocation's end: the first row of the table that applies.

    Args:
        killed: Whether the master killed it while it ran: a kill, or a pause or cancel of an allocation that was not
            ready or took longer than its preemption timeout.
        acked: Whether the script acknowledged a preemption or the end of its operations.
        begun: Whether anybody began to start it.
        lost: Whether nobody knows how it ended.
        status: Exit status; None if there is none.
        signal: Signal that ended it, or None.
    """
    if killed:
        return ExitKind.KILLED
    if acked:
        return ExitKind.PREEMPTED
    if not begun:
        return ExitKind.ABORTED
    if lost:
        return ExitKind.TRANSIENT
    if signal in _SIGNALS_OF_OTHERS:
        return ExitKind.TERMINATED
    return ExitKind.STOPPED if status == 0 and signal is None else ExitKind.FAILED


@dataclass
class Losses:
    """Count of the allocations of a trial that were lost in a row, all started from the same checkpoint."""

    count: int = 0
    start: str | None = None
    """Checkpoint that they were started from; None: from scratch."""

    def note(self, kind: ExitKind, start: str | None) -> int:
        """Add the trial's next end, of an allocation started from this checkpoint; return the count."""
        if kind is ExitKind.TRANSIENT:
            self.count = self.count + 1 if start == self.start else 1
            self.start = start
        elif kind not in (ExitKind.KILLED, ExitKind.ABORTED):  # which do not say whether the machine works
            self.count = 0
        return self.count


class Step(str, Enum):
    """Next step of a trial whose allocation has ended."""

    ALLOCATE = "allocate"
    """Queue a new allocation now."""
    WAIT = "wait"
    """It is paused: a new allocation when it is activated."""
    PARK = "park"
    """Its operation is complete: a new allocation when its search gives it another one."""
    END = "end"
    """It is over for good."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TrialFacts:
    """A trial whose allocation has just ended, before that changes it."""

    state: State
    restarts: int
    """Failures counted so far."""
    max_restarts: int
    op_complete: bool = False
    """Whether its current operation is complete; False if it has none."""
    closed: bool = False
    """Whether its search will give it no more operations."""
    stopped: bool = False
    """Whether its search has stopped it, whatever it is doing."""
    signalled: bool = False
    """Whether this allocation was told to stop: by pause, cancel, the scheduler or its search."""
    early_exit: str | None = None
    """Reason that the script gave for an early exit: ``INVALID_HP`` or ``USER_REQUESTED_STOP``."""
    failed: bool = False
    """Whether this allocation's process failed by itself, also if it had acknowledged before."""
    lost: int = 0
    """Number of its allocations, with this one, that were lost in a row without a new checkpoint."""


@dataclass(frozen=True)
class Next:
    """Decision on a trial."""

    step: Step
    state: State
    """The trial's state from now on."""
    restarts: int
    """Failures counted from now on."""
    reason: str | None = None
    """Reason for its search, with ``Step.END``: completed, errored, invalid_hp or canceled."""


def after_exit(trial: TrialFacts, kind: ExitKind) -> Next:
    """Return what a trial does next: the first row of the table that applies.

    It differs from the wire contract's table in five points. A trial that acknowledges a preemption that nobody asked
    for, with an operation left, is allocated again, but counts as restarted: it would go on for ever otherwise. A trial
    that ended for its hyperparameters is reported to its search as ``invalid_hp``, however its process ended. One that
    was to end anyway does not fail because something from outside was quicker. And one that is lost again and again
    without a new checkpoint counts as failing: it may be what brings its machine down. And one that acknowledges that
    it has no operation left, and then fails, has failed.
    """
    if trial.state.stopping:
        return _end(trial, State.ERROR if kind is ExitKind.FAILED else trial.state.end)
    if trial.stopped:
        return _end(trial, State.ERROR if kind is ExitKind.FAILED else State.COMPLETED)
    fails_after_ack = kind is ExitKind.PREEMPTED and trial.failed
    if trial.closed and trial.op_complete:
        return _end(trial, State.ERROR if kind is ExitKind.FAILED or fails_after_ack else State.COMPLETED)
    if kind is ExitKind.TRANSIENT and trial.lost <= MAX_LOSSES:
        return _again(trial, trial.restarts)
    if kind.is_error:
        return _count_failure(trial)
    if kind is ExitKind.STOPPED or trial.early_exit is not None:
        return _end(trial, State.COMPLETED)
    if fails_after_ack and trial.op_complete and trial.state is not State.PAUSED:
        return _count_failure(trial)
    if kind is ExitKind.PREEMPTED and not trial.signalled and not trial.op_complete:
        return _count_failure(trial)
    return _again(trial, trial.restarts)


def _count_failure(trial: TrialFacts) -> Next:
    if trial.restarts >= trial.max_restarts:
        return _end(trial, State.ERROR, failures=1)
    return _again(trial, trial.restarts + 1)


def _again(trial: TrialFacts, restarts: int) -> Next:
    if trial.op_complete:
        return Next(Step.PARK, trial.state, restarts)
    step = Step.ALLOCATE if trial.state is State.ACTIVE else Step.WAIT
    return Next(step, trial.state, restarts)


def _end(trial: TrialFacts, state: State, failures: int = 0) -> Next:
    if state is State.ERROR:
        reason = "errored"
    elif trial.early_exit == _INVALID_HP:
        reason = "invalid_hp"
    else:
        reason = "canceled" if state is State.CANCELED else "completed"
    return Next(Step.END, state, trial.restarts + failures, reason)
