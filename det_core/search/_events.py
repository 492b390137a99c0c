"""What a search is told (events) and what it decides (actions), as values that the record keeps as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, cast, get_args

from det_core._json import encode_nonfinite

JSON = dict[str, Any]
ExitReason = Literal["completed", "errored", "invalid_hp", "canceled"]
"""Why a trial is over: it exited by itself or as it was told, failed for good, could not be trained with these
hyperparameters, or was ended by a person."""


class Recordable:
    """An event or an action: equal to another one if it says the same."""

    __slots__ = ()
    kind: ClassVar[str]
    """What it is called in the record."""

    def to_dict(self) -> JSON:
        """The fact for JSON; a float that is not finite as the text NaN, Infinity or -Infinity."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{name: _plain(value) for name, value in values.items()}}


@dataclass(frozen=True, slots=True)
class Started(Recordable):
    """The experiment begins. Always the first event."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, slots=True)
class TrialCreated(Recordable):
    """A trial that the search asked for exists. Only custom methods use it."""

    kind: ClassVar[str] = "trial_created"
    request_id: str


@dataclass(frozen=True, slots=True)
class Completed(Recordable):
    """A trial has done its operation of that length; the metric is as reported (NaN counts as the worst)."""

    kind: ClassVar[str] = "completed"
    request_id: str
    length: int
    metric: float


@dataclass(frozen=True, slots=True)
class Validated(Recordable):
    """A trial has reported a validation, at the value ``step`` of the search's ``time_metric``, truncated."""

    kind: ClassVar[str] = "validated"
    request_id: str
    step: int
    metric: float


@dataclass(frozen=True, slots=True)
class Progress(Recordable):
    """How many units a trial has trained in all."""

    kind: ClassVar[str] = "progress"
    request_id: str
    units: float


@dataclass(frozen=True, slots=True)
class Exited(Recordable):
    """A trial is over for good: it will not be allocated again."""

    kind: ClassVar[str] = "exited"
    request_id: str
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Posted(Recordable):
    """Actions that a search outside the master has sent (wire contract 12.8)."""

    kind: ClassVar[str] = "posted"
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Create(Recordable):
    """Start a new trial. ``request_id`` is the search's name of it, a UUID; its seed is from 0 to 2**31 - 1."""

    kind: ClassVar[str] = "create"
    request_id: str
    hparams: JSON
    seed: int


@dataclass(frozen=True, slots=True)
class TrainTo(Recordable):
    """The trial's next operation: train until it has trained ``length`` units in all, and validate."""

    kind: ClassVar[str] = "train_to"
    request_id: str
    length: int


@dataclass(frozen=True, slots=True)
class Close(Recordable):
    """No more operations will come: the trial ends when it has done the one it has, if any."""

    kind: ClassVar[str] = "close"
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop(Recordable):
    """End the trial now, by preemption, although its operation is not done. Nothing comes after it."""

    kind: ClassVar[str] = "stop"
    request_id: str


@dataclass(frozen=True, slots=True)
class SetProgress(Recordable):
    """How much of the search is done, 0 to 1: only a custom method says so."""

    kind: ClassVar[str] = "set_progress"
    progress: float


@dataclass(frozen=True, slots=True)
class Shutdown(Recordable):
    """The search is over. ``failure``: every trial failed; ``cancel``: every trial was canceled."""

    kind: ClassVar[str] = "shutdown"
    failure: bool = False
    cancel: bool = False


Event = Started | TrialCreated | Completed | Validated | Progress | Exited | Posted
"""What a search can be told."""
Action = Create | TrainTo | Close | Stop | SetProgress | Shutdown
"""What a search can decide."""
_EVENTS: dict[str, type[Recordable]] = {cls.kind: cls for cls in get_args(Event)}
_ACTIONS: dict[str, type[Recordable]] = {cls.kind: cls for cls in get_args(Action)}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event of which ``data`` is the ``to_dict()``.

    Raises:
        ValueError: there is no such event.
    """
    return cast(Event, _fact(_EVENTS, data, "a search's event"))


def action_from_dict(data: Mapping[str, Any]) -> Action:
    """The action of which ``data`` is the ``to_dict()``.

    Raises:
        ValueError: there is no such action.
    """
    return cast(Action, _fact(_ACTIONS, data, "a search's action"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return encode_nonfinite(value)
    return [action.to_dict() for action in value] if isinstance(value, tuple) else value


def _fact(kinds: Mapping[str, type[Recordable]], data: Mapping[str, Any], what: str) -> Recordable:
    cls = kinds.get(str(data.get("kind")))
    if cls is None:
        raise ValueError(f"{what} has kind {data.get('kind')!r}; there are {', '.join(sorted(kinds))}")
    values = {name: value for name, value in data.items() if name != "kind"}
    wanted = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if values.keys() != wanted:
        raise ValueError(f"{what} {cls.kind!r} has the fields {sorted(values)}, and must have {sorted(wanted)}")
    for name in values.keys() & {"metric", "progress"}:
        values[name] = float(values[name])
    if cls is Posted:
        values["actions"] = tuple(map(action_from_dict, values["actions"]))
    return cls(**values)
