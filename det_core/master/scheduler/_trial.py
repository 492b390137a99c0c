"""What a trial does after an allocation of it has ended (wire contract, section 13.4)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from det_core.master.scheduler._exit import ExitKind
from det_core.master.scheduler._states import STOPS, State

INVALID_HP = "INVALID_HP"
MOST_LOST = 5
"""Losses in a row, without a new checkpoint, that are the machine's fault alone; later ones count as failures."""


class Step(str, Enum):
    """What comes next."""

    ALLOCATE = "allocate"
    """A new allocation of the trial is to be queued now."""
    WAIT = "wait"
    """It is paused: a new allocation when it is activated."""
    PARK = "park"
    """Its operation is done: a new allocation when, and if, its search gives it another one."""
    END = "end"
    """It is over for good."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TrialFacts:
    """A trial whose allocation has just ended, as it stands before that is taken into account."""

    state: State
    restarts: int
    """How many failures of it were counted so far."""
    max_restarts: int
    op_complete: bool = False
    """Whether its current operation is complete (no more is wanted of it for now); False if it has none."""
    closed: bool = False
    """Whether its search will never give it another operation."""
    stopped: bool = False
    """Whether its search has stopped it, whatever it is doing (searches by validations, as stopping ASHA)."""
    signalled: bool = False
    """Whether this allocation was told to stop (by pause, cancel, scheduler, or its search)."""
    early_exit: str | None = None
    """The reason that the script gave for an early exit: ``INVALID_HP`` or ``USER_REQUESTED_STOP``."""
    lost: int = 0
    """How many of its allocations, this one among them, were lost in a row without a new checkpoint."""
    never_retry: bool = False
    """Whether a log policy says that this failure is not to be tried again."""


@dataclass(frozen=True)
class Next:
    """What becomes of it."""

    step: Step
    state: State
    """The trial's state from now on."""
    restarts: int
    """Its count of failures from now on."""
    reason: str | None = None
    """For its search, with ``Step.END``: completed, errored, invalid_hp or canceled."""


def after_exit(facts: TrialFacts, kind: ExitKind) -> Next:
    """Decide what a trial does next; the first row of the table that fits.

    In four things this differs from the table. A trial that acknowledges a preemption that nobody asked for, with an
    operation left, is allocated again as the table says, but it counts as a restart: it would go on for ever
    otherwise. A trial that ended for its hyperparameters is told to its search as ``invalid_hp``, however its process
    ended. One that was to end anyway is not in error because something from outside was quicker than itself. And one
    that is lost again and again without getting any further counts as failing: it may be what brings its machine down.
    """
    at_fault = kind.is_error and not kind.from_outside
    if facts.state in STOPS:
        return _end(facts, State.ERROR if at_fault else STOPS[facts.state])
    if facts.stopped or (facts.closed and facts.op_complete):
        return _end(facts, State.ERROR if at_fault else State.COMPLETED)
    if kind is ExitKind.UNRECOVERABLE:
        return _end(facts, State.ERROR)
    if kind is ExitKind.TRANSIENT:
        return _again(facts, facts.restarts) if facts.lost <= MOST_LOST else _count_one(facts)
    if kind in (ExitKind.FAILED, ExitKind.TERMINATED):
        return _count_one(facts)
    if kind is ExitKind.STOPPED or facts.early_exit is not None:
        return _end(facts, State.COMPLETED)
    if kind is ExitKind.PREEMPTED and not facts.signalled and not facts.op_complete:
        return _count_one(facts)
    return _again(facts, facts.restarts)


def _count_one(facts: TrialFacts) -> Next:
    if facts.never_retry or facts.restarts >= facts.max_restarts:
        return _end(facts, State.ERROR, failures=1)
    return _again(facts, facts.restarts + 1)


def _again(facts: TrialFacts, restarts: int) -> Next:
    if facts.op_complete:
        return Next(Step.PARK, facts.state, restarts)
    return Next(Step.ALLOCATE if facts.state is State.ACTIVE else Step.WAIT, facts.state, restarts)


def _end(facts: TrialFacts, state: State, failures: int = 0) -> Next:
    return Next(Step.END, state, facts.restarts + failures, _reason(facts, state))


def _reason(facts: TrialFacts, state: State) -> str:
    if state is State.ERROR:
        return "errored"
    if facts.early_exit == INVALID_HP:
        return "invalid_hp"
    return "canceled" if state is State.CANCELED else "completed"
