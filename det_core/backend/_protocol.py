"""The seam between a script and whoever answers its questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Backend(Protocol):
    """Answers a script's questions.

    Reports (metrics, progress, status) go to the journal and need no answer. A question is journaled first, then put to
    the backend, and answered before the call returns. Only the chief asks, where not said otherwise.
    """

    def latest_checkpoint(self) -> str | None:
        """The storage_id to start from."""

    def next_operation(self) -> int | None:
        """The absolute length to train to next, in the searcher's units; None: nothing (more) to do."""

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        """The operation of ``length`` is done. Saying it twice changes nothing."""

    def acknowledge_out_of_operations(self) -> None:
        """This process exits because :meth:`next_operation` had no more."""

    def acknowledge_preemption(self) -> None:
        """This process exits, unfinished, because it was asked to. Any rank may say it."""

    def best_validation(self) -> float | None:
        """The best searcher metric reported so far in the whole experiment. Any rank may ask."""

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the run's metadata; returns what is now set. Any rank may ask."""

    def get_metadata(self) -> dict[str, Any]:
        """The run's metadata. Any rank may ask."""

    def alert(self, title: str, description: str, level: str) -> None:
        """Bring something to a person's attention. ``level``: debug, info, warning or error. Any rank may ask."""
