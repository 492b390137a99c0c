"""The seam between a script and whoever answers its questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Backend(Protocol):
    """Answers a script's questions.

    Reports (metrics, progress, status) go to the journal and need no answer. A question is journaled first, then put to
    the backend, and answered before the call returns. Only the chief asks, where not said otherwise.
    """

    def next_operation(self) -> int | None:
        """The absolute length to train to next, in the searcher's units; None: nothing (more) to do."""

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        """The operation of ``length`` is done. Saying it twice changes nothing."""

    def acknowledge_out_of_operations(self) -> None:
        """This process exits because :meth:`next_operation` had no more."""

    def acknowledge_preemption(self) -> None:
        """This process exits, unfinished, because it was asked to. Any rank may say it."""

    def preempted(self, timeout: float) -> bool:
        """Whether this process is asked to stop; waits up to ``timeout`` seconds for that. Any rank may ask.

        Raises:
            MasterError: there is no answer, or :meth:`stop_waiting` was called.
        """

    def stop_waiting(self) -> None:
        """Nobody needs the answer of :meth:`preempted` any more."""

    def best_validation(self) -> float | None:
        """The best searcher metric reported so far in the whole experiment. Any rank may ask."""

    def last_validation(self) -> int | None:
        """The last step at which a validation was reported; None: none was. Any rank may ask."""

    def last_validation_metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the last validation that was reported; empty if none was."""

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the run's metadata; returns what is now set. Any rank may ask."""

    def get_metadata(self) -> dict[str, Any]:
        """The run's metadata. Any rank may ask."""

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint is complete: its record, as it is journaled. Saying it twice changes nothing."""

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Files of a checkpoint were deleted; ``remaining`` are left, with their sizes. Any rank may say it."""

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        """What is known of a checkpoint beside what its store says; None: nothing. Any rank may ask."""

    def early_exit(self, reason: str) -> None:
        """This trial ends before its time: ``INVALID_HP`` or ``USER_REQUESTED_STOP``. Any rank may say it."""

    def alert(self, title: str, description: str, level: str) -> None:
        """Bring something to a person's attention. ``level``: debug, info, warning or error. Any rank may ask."""

    def close(self) -> None:
        """The journal is closed: see that all of it gets to where it belongs, and let go.

        Raises:
            ReportsNotShipped: some of it did not.
        """
