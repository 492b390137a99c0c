"""Ends of allocations: their kind (wire contract, section 13.3), and what their trial does next (section 13.4)."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from det_core.master.scheduler._states import State, Word

MAX_LOSSES = 5
"""Losses in a row, without a new checkpoint, that are the machine's fault alone; later ones count as failures."""
_INVALID_HP = "INVALID_HP"
_SIGNALS_OF_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that others send; a program gets the rest for what it does itself."""


class Cause(Word):
    """Cause of an allocation's end, other than its script; an engine reports it."""

    NONE = "NONE"
    """The script ended by itself; its status or its signal says how."""
    LOST = "LOST"
    """The machine or the supervisor was lost, so that nobody knows how the script ended."""
    TAKEN = "TAKEN"
    """The cluster took the machine back."""
    TIME = "TIME"
    """The time limit of its job in the cluster was reached."""
    MEMORY = "MEMORY"
    """The machine ran out of memory, or the job reached its limit."""
    CANCELLED = "CANCELLED"
    """An order ended it: the master's, or one that somebody gave to the cluster."""
    REFUSED = "REFUSED"
    """It cannot run as it was asked for; the next try would be refused, too."""
    NOT_STARTED = "NOT_STARTED"
    """Its script never began, although nobody stopped it."""


class ExitKind(Word):
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
    """Its machine was lost or taken back, or its time limit was reached after it had saved."""
    REFUSED = "refused"
    """It can never run."""

    @property
    def is_error(self) -> bool:
        """Whether it counts as an error."""
        return self in (ExitKind.FAILED, ExitKind.TERMINATED, ExitKind.TRANSIENT, ExitKind.REFUSED)


def classify(
    cause: Cause,
    status: int | None = None,
    signal: int | None = None,
    *,
    killed: bool = False,
    acked: bool = False,
    tried: bool = True,
    saved: bool = False,
) -> ExitKind:
    """Return the kind of an allocation's end: the first row of the table that applies.

    Args:
        cause: Cause that the engine reported.
        status: Exit status; None if there is none.
        signal: Signal that ended it, or None.
        killed: Whether the master killed it while it ran: a kill, or a pause or cancel of an allocation that was not
            ready or took longer than its preemption timeout.
        acked: Whether the script acknowledged a preemption or the end of its operations.
        tried: Whether this master tried to start it. If an earlier master recorded it and did not live to start it,
            that it never began is nobody's failure.
        saved: Whether it saved a checkpoint.
    """
    if killed:
        return ExitKind.KILLED
    if acked:
        return ExitKind.PREEMPTED
    if cause is Cause.REFUSED:
        return ExitKind.REFUSED
    if cause is Cause.NOT_STARTED:
        return ExitKind.FAILED if tried else ExitKind.ABORTED
    # The machine's fault, so that no restart is used up.
    if cause in (Cause.LOST, Cause.TAKEN):
        return ExitKind.TRANSIENT
    # With a checkpoint it has got further, and the next allocation goes on there.
    if cause is Cause.TIME:
        return ExitKind.TRANSIENT if saved else ExitKind.FAILED
    # After the causes: a script that is ended from outside may still exit with 0.
    if status == 0 and signal is None:
        return ExitKind.STOPPED
    if cause in (Cause.MEMORY, Cause.CANCELLED) or signal in _SIGNALS_OF_OTHERS:
        return ExitKind.TERMINATED
    return ExitKind.FAILED


@dataclass
class Losses:
    """Count of the allocations of a trial that were lost in a row, all started from the same checkpoint."""

    count: int = 0
    start: str | None = None
    """Checkpoint that they were started from; None: from scratch."""

    def note(self, kind: ExitKind, start: str | None) -> int:
        """Add the trial's next end, of an allocation started from this checkpoint; return the count."""
        if kind is ExitKind.TRANSIENT:
            # A new checkpoint between two losses shows that the machines do work.
            self.count = self.count + 1 if start == self.start else 1
            self.start = start
        elif kind not in (ExitKind.KILLED, ExitKind.ABORTED):  # which do not say whether the machine works
            self.count = 0
        return self.count


class Step(Word):
    """Next step of a trial whose allocation has ended."""

    ALLOCATE = "allocate"
    """Queue a new allocation now."""
    WAIT = "wait"
    """A new allocation when it is activated, or its search gives it another operation."""
    END = "end"
    """It is over for good."""


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
    """Whether this allocation was asked to stop: by pause, cancel, the scheduler or its search."""
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

    It differs from the wire contract's table in six points. A trial that acknowledges a preemption that nobody asked
    for, with an operation left, is allocated again, but counts as restarted: it would go on for ever otherwise. A trial
    that ended for its hyperparameters is reported to its search as ``invalid_hp``, however its process ended. One that
    was to end anyway does not fail because something from outside was quicker. And one that is lost again and again
    without a new checkpoint counts as failing: it may be what brings its machine down. One that acknowledges that it
    has no operation left, and then fails, has failed. And one that an engine refuses to run is not tried again.
    """
    if trial.state.stopping:
        return _end(trial, trial.state.end, failed=kind is ExitKind.FAILED)
    if trial.stopped:
        return _end(trial, State.COMPLETED, failed=kind is ExitKind.FAILED)
    fails_after_ack = kind is ExitKind.PREEMPTED and trial.failed
    if trial.closed and trial.op_complete:
        return _end(trial, State.COMPLETED, failed=kind is ExitKind.FAILED or fails_after_ack)
    if kind is ExitKind.REFUSED:
        return _end(trial, State.ERROR)  # no other attempt would get further
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
    if trial.op_complete or trial.state is not State.ACTIVE:
        return Next(Step.WAIT, trial.state, restarts)
    return Next(Step.ALLOCATE, trial.state, restarts)


def _end(trial: TrialFacts, state: State, failures: int = 0, *, failed: bool = False) -> Next:
    if failed:
        state = State.ERROR
    if state is State.ERROR:
        reason = "errored"
    elif trial.early_exit == _INVALID_HP:
        reason = "invalid_hp"
    elif state is State.CANCELED:
        reason = "canceled"
    else:
        reason = "completed"
    return Next(Step.END, state, trial.restarts + failures, reason)
