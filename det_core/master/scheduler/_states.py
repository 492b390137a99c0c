"""The states of experiments and trials, and which may follow which (wire contract, section 13.2)."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """The state of an experiment or a trial; on the wire each has ``STATE_`` in front."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"
    DELETING = "DELETING"
    DELETED = "DELETED"
    DELETE_FAILED = "DELETE_FAILED"

    def __str__(self) -> str:
        return self.value

    @property
    def terminal(self) -> bool:
        """Whether nothing runs, or will run, unless somebody continues it."""
        return self in TERMINAL or self in DELETION

    @property
    def stopping(self) -> bool:
        """Whether it ends as soon as what still runs has ended."""
        return self in STOPS

    @property
    def end(self) -> State:
        """What a state of stopping ends in, if nothing goes wrong on the way; any other: itself."""
        return STOPS.get(self, self)


class Phase(str, Enum):
    """How far the allocation of a trial is that is ``ACTIVE``."""

    QUEUED = "QUEUED"
    PULLING = "PULLING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"

    def __str__(self) -> str:
        return self.value


TERMINAL = frozenset({State.COMPLETED, State.CANCELED, State.ERROR})
DELETION = frozenset({State.DELETING, State.DELETED, State.DELETE_FAILED})
STOPS: dict[State, State] = {
    State.STOPPING_CANCELED: State.CANCELED,
    State.STOPPING_KILLED: State.CANCELED,
    State.STOPPING_COMPLETED: State.COMPLETED,
    State.STOPPING_ERROR: State.ERROR,
}
"""What a state of stopping ends in, if nothing goes wrong on the way."""

_ALIVE = {State.ACTIVE, State.PAUSED}
_EXPERIMENT: dict[State, frozenset[State]] = {
    State.ACTIVE: frozenset({State.PAUSED, *STOPS}),
    State.PAUSED: frozenset({State.ACTIVE, *STOPS}),
    State.STOPPING_CANCELED: frozenset({State.STOPPING_KILLED, State.CANCELED, State.ERROR}),
    **{s: frozenset({end, State.ERROR}) for s, end in STOPS.items() if s is not State.STOPPING_CANCELED},
    **{s: frozenset({State.DELETING}) for s in TERMINAL},
    State.DELETING: frozenset({State.DELETED, State.DELETE_FAILED}),
    State.DELETE_FAILED: frozenset({State.DELETING}),
    State.DELETED: frozenset(),
}


def experiment_may(old: State, new: State, *, continued: bool = False) -> bool:
    """Whether an experiment may go from ``old`` to ``new``.

    Args:
        old: its state.
        new: another state; the same is no change and always allowed.
        continued: somebody asked to continue it, by which alone a terminal experiment becomes active again.
    """
    return new is old or new in _EXPERIMENT[old] or (continued and old in TERMINAL and new in _ALIVE)


def trial_may(old: State, new: State, *, continued: bool = False) -> bool:
    """Whether a trial may go from ``old`` to ``new``: as an experiment, but it also ends by itself, and is not deleted.

    Args:
        old: its state.
        new: another state; the same is no change and always allowed.
        continued: somebody asked to continue its experiment.
    """
    if new in DELETION:
        return False
    return experiment_may(old, new, continued=continued) or (old in _ALIVE and new in TERMINAL)
