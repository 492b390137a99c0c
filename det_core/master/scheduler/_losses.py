"""How often a trial was lost in a row: by faults of the machine, and without getting any further."""

from __future__ import annotations

from dataclasses import dataclass

from det_core.master.scheduler._exit import ExitKind

SILENT = (ExitKind.KILLED, ExitKind.ABORTED)
"""Ends that say nothing of the machine."""


@dataclass
class Losses:
    """Counts the allocations of a trial that were lost one after the other, all started from the same checkpoint.

    Attributes:
        count: how many there were.
        start: the checkpoint that they were started from; None: from scratch.
    """

    count: int = 0
    start: str | None = None

    def note(self, kind: ExitKind, start: str | None) -> int:
        """Take the end of the trial's next allocation into account; returns the count.

        Args:
            kind: how it ended.
            start: the checkpoint that it was started from.
        """
        if kind is ExitKind.TRANSIENT:
            self.count = self.count + 1 if start == self.start else 1
            self.start = start
        elif kind not in SILENT:
            self.count = 0
        return self.count
