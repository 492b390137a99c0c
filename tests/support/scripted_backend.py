"""A backend whose answers are set by hand."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any


class ScriptedBackend:
    """Backend that answers from its attributes, and keeps what it receives."""

    def __init__(self, lengths: Sequence[int] = (1,)) -> None:
        self.lengths = list(lengths)
        self.best: float | None = None
        self.metadata: dict[str, Any] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.told: list[tuple[str, Any]] = []
        self.stop = False
        self._changed = threading.Condition()
        self._nobody_waits = False
        self.closed = 0

    def preempt(self) -> None:
        """Ask to stop."""
        with self._changed:
            self.stop = True
            self._changed.notify_all()

    def next_operation(self) -> int | None:
        return self.lengths[0] if self.lengths else None

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        self.told.append(("operation", (length, searcher_metric)))
        if self.lengths[:1] == [length]:
            self.lengths.pop(0)

    def acknowledge_out_of_operations(self) -> None:
        self.told.append(("out_of_operations", None))

    def acknowledge_preemption(self) -> None:
        self.told.append(("preempt", None))

    def preempted(self, timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.stop or self._nobody_waits, timeout)
            return self.stop

    def stop_waiting(self) -> None:
        with self._changed:
            self._nobody_waits = True
            self._changed.notify_all()

    def best_validation(self) -> float | None:
        return self.best

    def last_validation_metrics(self) -> Mapping[str, Any]:
        return {}

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        self.metadata = dict(metadata)
        return self.metadata

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints[checkpoint["storage_id"]] = dict(checkpoint)

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        self.checkpoints.pop(storage_id, None)

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        found = self.checkpoints.get(storage_id)
        return None if found is None else dict(found["metadata"])

    def early_exit(self, reason: str) -> None:
        self.told.append(("early_exit", reason))

    def alert(self, title: str, description: str, level: str) -> None:
        self.told.append(("alert", (title, description, level)))

    def close(self) -> None:
        self.closed += 1
