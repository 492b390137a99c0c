"""Which rows of a trial count, after it was resumed: pure rules.

They are those of the journal's own reader, with attempts (run, restart) in the place of restarts. In each group a
row is superseded by a later attempt that

- reported the same step (the reader of a series sees that by itself), or
- whose first row in that group has the same or a smaller step, or
- restored a checkpoint of a smaller step.

For what came by the one-report route the wire contract's rule (§5.2) stands: each row, not only the first,
supersedes those of earlier attempts from its step on, and those of other groups beyond its step. Rows without a
step, and those of the system's groups, never are superseded.
"""

from __future__ import annotations

from collections.abc import Iterable

from det_core.master.store._reports import NO_STEP
from det_core.master.store._writers import REPORTED, SYSTEM, Attempt, Writer


class Visible:
    """Decides for the rows of one trial.

    Args:
        writers: all writers of the trial.
    """

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = sorted(writers, key=lambda writer: writer.attempt, reverse=True)
        self._limits: dict[str, dict[Attempt, int]] = {}

    def beyond(self, group: str, attempt: Attempt) -> int:
        """The step from which on this attempt's rows of the group are superseded; NO_STEP if none are."""
        limits = self._limits.get(group)
        if limits is None:
            limits = self._limits[group] = self._of(group)
        return limits.get(attempt, NO_STEP)

    def _of(self, group: str) -> dict[Attempt, int]:
        limits: dict[Attempt, int] = {}
        if group in SYSTEM:
            return limits
        limit = NO_STEP  # by all later attempts
        at: Attempt | None = None
        own = NO_STEP  # by the attempt ``at`` too
        for writer in self._writers:
            if writer.attempt != at:
                limit, at = own, writer.attempt
            limits[writer.attempt] = limit
            own = min(own, _begins(writer, group))
        return limits


def _begins(writer: Writer, group: str) -> int:
    """The step from which on a writer takes the place of earlier attempts in a group."""
    begins = NO_STEP
    if writer.restored is not None:
        begins = writer.restored + 1
    for name, known in writer.groups.items():
        if known.first is None or known.low is None or name in SYSTEM:
            continue
        if writer.rank != REPORTED:
            begins = min(begins, known.first) if name == group else begins
        else:
            begins = min(begins, known.low if name == group else known.low + 1)
    return begins
