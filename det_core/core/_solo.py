"""Collectives without links, so that a job of one rank loads none of what links ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SoloLane:
    """The collectives of a job of one rank (or of the one rank of a machine): everything comes back as it is."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def gather(self, obj: Any, *, timeout: float | None = None) -> list[Any] | None:
        """``[obj]``."""
        self._check()
        return [obj]

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """``[obj]``."""
        self._check()
        return [obj]

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """``obj``."""
        self._check()
        return obj

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Nobody else is to come."""
        self._check()
