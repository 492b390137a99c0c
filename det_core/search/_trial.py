"""What a search remembers of a trial."""

from __future__ import annotations

from typing import Any

WORST = 1.7976931348623157e308
"""The metric that stands for none: the largest finite number."""


class Trial:
    """A trial as its search sees it."""

    __slots__ = ("bracket", "closed", "done", "entered", "exited", "length", "metric", "request_id", "rung", "units")

    def __init__(self, request_id: str, bracket: int = 0) -> None:
        self.request_id = request_id
        self.length: int | None = None
        """The length of the operation it has not done yet."""
        self.done = -1
        """The length of the last operation it has done; -1: none yet."""
        self.units: float = 0
        """How much it has trained."""
        self.closed = False
        self.exited: str | None = None
        """The reason of its exit."""
        self.bracket = bracket
        self.rung = 0
        self.entered = 0
        """On how many rungs it is, from the lowest; a snapshot's rungs tell it."""
        self.metric = WORST
        """What it last reported, smaller being better."""

    @property
    def gone(self) -> bool:
        """Whether it will train no more."""
        return self.closed or self.exited is not None

    def to_list(self) -> list[Any]:
        """For a snapshot."""
        return [
            self.request_id, self.length, self.done, self.units, self.closed, self.exited, self.bracket, self.rung,
            self.metric,
        ]  # fmt: skip

    @classmethod
    def from_list(cls, values: list[Any]) -> Trial:
        """From a snapshot."""
        trial = cls(values[0])
        (
            _, trial.length, trial.done, trial.units, trial.closed, trial.exited, trial.bracket, trial.rung,
            trial.metric,
        ) = values  # fmt: skip
        return trial
