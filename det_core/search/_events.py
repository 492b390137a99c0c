"""Events that a search receives and actions that it decides, as values that its record keeps as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, cast, get_args

from det_core._json import encode_nonfinite

JSON = dict[str, Any]
ExitReason = Literal["completed", "errored", "invalid_hp", "canceled"]
"""Reason of a trial's end.

``completed``: it exited by itself or at a decision of the search; ``errored``: it failed more often than it may;
``invalid_hp``: its hyperparameters cannot be trained; ``canceled``: a person ended it.
"""


class Recordable:
    """An event or an action: equal to another one of the same kind with equal fields."""

    __slots__ = ()
    kind: ClassVar[str]
    """Name of the class in the record."""

    def to_dict(self) -> JSON:
        """Return the fields for JSON; a number that is not finite is the string NaN, Infinity or -Infinity."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{name: _to_plain(value) for name, value in values.items()}}


@dataclass(frozen=True, slots=True)
class Started(Recordable):
    """Start of the experiment; always the first event."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, slots=True)
class TrialCreated(Recordable):
    """Creation of a trial that the search requested; only custom methods receive it."""

    kind: ClassVar[str] = "trial_created"
    request_id: str


@dataclass(frozen=True, slots=True)
class Completed(Recordable):
    """Completion of a trial's operation of that length; the metric is as reported (NaN counts as the worst)."""

    kind: ClassVar[str] = "completed"
    request_id: str
    length: int
    metric: float


@dataclass(frozen=True, slots=True)
class Validated(Recordable):
    """Validation of a trial, at the value ``step`` of the search's ``time_metric``, truncated."""

    kind: ClassVar[str] = "validated"
    request_id: str
    step: int
    metric: float


@dataclass(frozen=True, slots=True)
class Progress(Recordable):
    """Units that a trial has trained in all."""

    kind: ClassVar[str] = "progress"
    request_id: str
    units: float


@dataclass(frozen=True, slots=True)
class Exited(Recordable):
    """End of a trial for good: it will not be allocated again."""

    kind: ClassVar[str] = "exited"
    request_id: str
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Create(Recordable):
    """Request for a new trial: ``request_id`` is its ID in the search, a UUID; its seed is from 0 to 2**31 - 1."""

    kind: ClassVar[str] = "create"
    request_id: str
    hparams: JSON
    seed: int


@dataclass(frozen=True, slots=True)
class TrainTo(Recordable):
    """Next operation of a trial: train until it has trained ``length`` units in all, and validate."""

    kind: ClassVar[str] = "train_to"
    request_id: str
    length: int


@dataclass(frozen=True, slots=True)
class Close(Recordable):
    """Last action for a trial: it ends when its present operation, if any, is completed."""

    kind: ClassVar[str] = "close"
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop(Recordable):
    """End of a trial now, by preemption, although its operation is not completed; its last action."""

    kind: ClassVar[str] = "stop"
    request_id: str


@dataclass(frozen=True, slots=True)
class SetProgress(Recordable):
    """Fraction of the search that is done, 0 to 1; only custom methods decide it."""

    kind: ClassVar[str] = "set_progress"
    progress: float


@dataclass(frozen=True, slots=True)
class Shutdown(Recordable):
    """End of the search. ``failure``: every trial failed; ``cancel``: every trial was canceled."""

    kind: ClassVar[str] = "shutdown"
    failure: bool = False
    cancel: bool = False


Event = Started | TrialCreated | Completed | Validated | Progress | Exited
"""Any event of a search."""
Action = Create | TrainTo | Close | Stop | SetProgress | Shutdown
"""Any action of a search."""
_EVENTS: dict[str, type[Recordable]] = {cls.kind: cls for cls in get_args(Event)}
_ACTIONS: dict[str, type[Recordable]] = {cls.kind: cls for cls in get_args(Action)}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event whose ``to_dict()`` is ``data``.

    Raises:
        ValueError: If the kind or the fields are not those of an event.
    """
    return cast(Event, _from_dict(_EVENTS, data, "search event"))


def action_from_dict(data: Mapping[str, Any]) -> Action:
    """Return the action whose ``to_dict()`` is ``data``.

    Raises:
        ValueError: If the kind or the fields are not those of an action.
    """
    return cast(Action, _from_dict(_ACTIONS, data, "search action"))


def _to_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return encode_nonfinite(value)
    return value


def _from_dict(kinds: Mapping[str, type[Recordable]], data: Mapping[str, Any], what: str) -> Recordable:
    cls = kinds.get(str(data.get("kind")))
    if cls is None:
        raise ValueError(f"invalid {what} kind {data.get('kind')!r}: expected one of {', '.join(sorted(kinds))}")
    values = {name: value for name, value in data.items() if name != "kind"}
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if values.keys() != names:
        raise ValueError(f"{what} {cls.kind!r} has the fields {sorted(values)}: expected {sorted(names)}")
    # A metric that is not finite is a string in the record; float() reads it back.
    for name in values.keys() & {"metric", "progress"}:
        values[name] = float(values[name])
    return cls(**values)
