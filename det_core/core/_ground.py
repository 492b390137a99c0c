"""What a context stands on: what differs between a bare run and one under a master."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from det_core._info import ClusterInfo
from det_core.backend import Backend
from det_core.core._searcher import Unit
from det_core.journal import Journal
from det_core.storage import Store


class Run(Protocol):
    """The run as this rank records it."""

    @property
    def run_id(self) -> str:
        """Whose checkpoints these are."""

    @property
    def restart(self) -> int:
        """How often it was started before: later ones have larger numbers."""

    @property
    def path(self) -> Path:
        """The folder of its journal."""

    def last_line(self, outcome: str, detail: str) -> str:
        """What a person is told when it ends."""

    def release(self) -> None:
        """Let another process record it."""


@dataclass(frozen=True)
class Ground:
    """One of the ways to run.

    Attributes:
        run: the run.
        journal: this rank's.
        backend: who answers questions.
        store: where checkpoints lie.
        storage: what opens that store again, for the record.
        latest_checkpoint: the storage_id to start from.
        steps_completed: those of that checkpoint; 0 without one.
        elsewhere: by storage_id, the stores of checkpoints that lie in another one.
        beside: the folder below the store's root that event files are copied to; None: they stay in the run's folder.
        units: what the searcher's lengths count.
        metric: the validation metric that is searched over; None: nothing says.
        smaller_is_better: which end of it is best.
        agent_id: names the machine in the profiler's metrics.
        first_lines: what a person is told when it starts.
        info: what the cluster says of this task.
        journal_restart: the restart by which this rank's journal is named, where that is not the run's.
        asks_master: whether the backend says when to stop; else signals do.
    """

    run: Run
    journal: Journal
    backend: Backend
    store: Store
    storage: Any
    latest_checkpoint: str | None
    beside: str | None
    units: Unit | None
    agent_id: str
    steps_completed: int = 0
    metric: str | None = None
    smaller_is_better: bool = True
    elsewhere: Mapping[str, Store] = field(default_factory=dict)
    first_lines: tuple[str, ...] = ()
    info: ClusterInfo | None = None
    journal_restart: int | None = None
    asks_master: bool = False
    undo: Callable[[], None] = lambda: None
    """Lets go of what was opened, if the context cannot be made after all."""
