"""What the helper was asked to do, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from det_core.core._checkpoint._latch import Latch
from det_core.errors import CheckpointError, StorageError


class Unavailable(Exception):
    """There can be no helper here."""


class HelperDied(CheckpointError):
    """The helper ended in the middle of its work."""


class Errand:
    """One order, sent.

    Args:
        then: called with it once it is over, in the thread that hears of it.
    """

    def __init__(self, then: Callable[[Errand], None] | None = None) -> None:
        self._then = then
        self._over = Latch()
        self._answer: dict[str, Any] = {}
        self._error: Exception | None = None

    def answered(self, answer: dict[str, Any]) -> None:
        """The helper has said what came of it."""
        self._answer = answer
        self._end()

    def failed(self, error: Exception) -> None:
        """Nothing will be heard of it."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._over.set()
        if self._then is not None:
            self._then(self)

    def wait(self, timeout: float) -> bool:
        """Whether it is over, waiting so many seconds for that."""
        return self._over.wait(timeout)

    def result(self) -> dict[str, Any]:
        """What was done; for when it is over.

        Raises:
            Unavailable: there is no helper, and will be none.
            HelperDied: it ended; what it did until then is not known.
            StorageError, CheckpointError: what it could not do, and why.
        """
        assert self._over.is_set
        if self._error is not None:
            raise self._error
        if "done" in self._answer:
            return self._answer["done"]  # type: ignore[no-any-return]
        if self._answer["kind"] == "StorageError":
            raise StorageError(self._answer["number"], self._answer["text"])
        raise CheckpointError(f"{self._answer['kind']}: {self._answer['text']}")
