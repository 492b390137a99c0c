"""Subjects of a check: a command that trains as bare runs, and the interface that it shares with a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from det_core.check_resume._records import Training, read_training
from det_core.check_resume._trainings import Home, Start


class Place(Protocol):
    """Place of one training, which is started once or twice."""

    def run(self, plan: dict[str, Any], timeout: float | None = None) -> Start:
        """Start the training, from the second time on to resume it, and wait until it has stopped."""

    def read(self, name: str, starts: tuple[Start, ...]) -> Training:
        """Read the training from its record."""


class Subject(Protocol):
    """Training that is checked.

    Attributes:
        resumes_after_end: whether one that is complete can be started again.
    """

    resumes_after_end: bool

    def place(self, path: Path, on_progress: Callable[[int], None]) -> Place:
        """Return the place of a training, with a new folder for it; ``on_progress`` receives reported steps."""


class CommandSubject:
    """Bare runs of a command, each in a home of its own.

    Args:
        command: the command.
    """

    resumes_after_end = True

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def place(self, path: Path, on_progress: Callable[[int], None]) -> Place:
        """Return the place of a training."""
        return _CommandPlace(path, self._command, on_progress)


class _CommandPlace(Home):
    """Home folder that can be read."""

    def read(self, name: str, starts: tuple[Start, ...]) -> Training:
        """Read the training from its journal."""
        return read_training(name, self.path, starts)
