"""What a search decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from det_core.search._fact import JSON, Fact, named


@dataclass(frozen=True, slots=True)
class Create(Fact):
    """Start a new trial."""

    kind: ClassVar[str] = "create"
    request_id: str
    """A UUID: the search's name of the trial."""
    hparams: JSON
    seed: int
    """The trial's own seed, 0 to 2**31 - 1."""


@dataclass(frozen=True, slots=True)
class TrainTo(Fact):
    """The trial's next operation: train until it has trained ``length`` units in all, and validate."""

    kind: ClassVar[str] = "train_to"
    request_id: str
    length: int


@dataclass(frozen=True, slots=True)
class Close(Fact):
    """No more operations will come: the trial ends when it has done the one it has, if any."""

    kind: ClassVar[str] = "close"
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop(Fact):
    """End the trial now, by preemption, although its operation is not done. Nothing comes after it."""

    kind: ClassVar[str] = "stop"
    request_id: str


@dataclass(frozen=True, slots=True)
class SetProgress(Fact):
    """How much of the search is done, 0 to 1: only a custom method says so."""

    kind: ClassVar[str] = "set_progress"
    progress: float


@dataclass(frozen=True, slots=True)
class Shutdown(Fact):
    """The search is over."""

    kind: ClassVar[str] = "shutdown"
    failure: bool = False
    """Every trial failed."""
    cancel: bool = False
    """Every trial was canceled."""


Action = Create | TrainTo | Close | Stop | SetProgress | Shutdown
"""What a search can decide."""

_KINDS: dict[str, type[Fact]] = {cls.kind: cls for cls in (Create, TrainTo, Close, Stop, SetProgress, Shutdown)}


def action_from_dict(data: Mapping[str, Any]) -> Action:
    """The action of which ``data`` is the ``to_dict()``.

    Raises:
        ValueError: there is no such action.
    """
    cls, values = named(_KINDS, data, "a search's action")
    if cls is SetProgress:
        values["progress"] = float(values["progress"])
    return cast(Action, cls(**values))
