"""What a search is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from det_core.search._actions import Action, action_from_dict
from det_core.search._fact import Fact, named

Reason = Literal["completed", "errored", "invalid_hp", "canceled"]
"""Why a trial is over: it exited by itself or as it was told, failed for good, could not be trained with these
hyperparameters, or was ended by a person."""


@dataclass(frozen=True, slots=True)
class Started(Fact):
    """The experiment begins. Always the first event."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, slots=True)
class TrialCreated(Fact):
    """A trial that the search asked for is there. Only custom methods use it."""

    kind: ClassVar[str] = "trial_created"
    request_id: str


@dataclass(frozen=True, slots=True)
class Completed(Fact):
    """A trial has done its operation."""

    kind: ClassVar[str] = "completed"
    request_id: str
    length: int
    """The operation's length."""
    metric: float
    """The searcher's metric as the trial reported it: not negated, NaN allowed (it counts as the worst)."""


@dataclass(frozen=True, slots=True)
class Validated(Fact):
    """A trial has reported a validation. Only searches with a ``time_metric`` use it."""

    kind: ClassVar[str] = "validated"
    request_id: str
    step: int
    """The value of the ``time_metric``, truncated."""
    metric: float


@dataclass(frozen=True, slots=True)
class Progress(Fact):
    """How many units a trial has trained in all."""

    kind: ClassVar[str] = "progress"
    request_id: str
    units: float


@dataclass(frozen=True, slots=True)
class Exited(Fact):
    """A trial is over for good: it will not be allocated again."""

    kind: ClassVar[str] = "exited"
    request_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Posted(Fact):
    """Operations that a search which runs outside the master has sent (wire contract 12.8)."""

    kind: ClassVar[str] = "posted"
    actions: tuple[Action, ...]


Event = Started | TrialCreated | Completed | Validated | Progress | Exited | Posted
"""What a search can be told."""

_KINDS: dict[str, type[Fact]] = {
    cls.kind: cls for cls in (Started, TrialCreated, Completed, Validated, Progress, Exited, Posted)
}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event of which ``data`` is the ``to_dict()``.

    Raises:
        ValueError: there is no such event.
    """
    cls, values = named(_KINDS, data, "a search's event")
    if "metric" in values:
        values["metric"] = float(values["metric"])
    if "actions" in values:
        values["actions"] = tuple(action_from_dict(action) for action in values["actions"])
    return cast(Event, cls(**values))
