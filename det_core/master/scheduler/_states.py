"""States of experiments and trials (wire contract, section 13.2)."""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """Enumeration whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)


class State(Word):
    """State of an experiment or a trial; on the wire each has the prefix ``STATE_``."""

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

    @property
    def terminal(self) -> bool:
        """Whether nothing runs, or will run, unless the experiment is continued."""
        return self not in _ENDS and self not in (State.ACTIVE, State.PAUSED)

    @property
    def stopping(self) -> bool:
        """Whether it ends as soon as what still runs has ended."""
        return self in _ENDS

    @property
    def end(self) -> State:
        """The state that a stopping state leads to; any other state is its own."""
        return _ENDS.get(self, self)

    def after_order(self, order: State) -> State:
        """Return the state after an order to stop.

        Args:
            order: Stopping state that is ordered.
        """
        # A kill hastens an end that was decided before: a failed experiment stays failed.
        if self.stopping and self is not State.STOPPING_CANCELED:
            return self
        return order


class Phase(Word):
    """Progress of the allocation of an ``ACTIVE`` trial."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"


_ENDS: dict[State, State] = {
    State.STOPPING_CANCELED: State.CANCELED,
    State.STOPPING_KILLED: State.CANCELED,
    State.STOPPING_COMPLETED: State.COMPLETED,
    State.STOPPING_ERROR: State.ERROR,
}
"""State that each stopping state leads to, if nothing fails on the way."""
