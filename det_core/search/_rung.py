"""A rung: the metrics of the trials that got there, and which of them are among the best.

A decision asks one thing only: which entries are the best ``k``, where ``k`` follows from how many there are and grows
by one at most with each. So the best ``k`` are kept in one heap, worst on top, and the others in another one, best on
top: an entry costs O(log n), however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from det_core.search._trial import Trial

Key = tuple[float, int]
"""A metric, and a number that puts equal ones in order. The smallest is the best."""


class Rung:
    """One rung of a bracket."""

    __slots__ = ("_best", "_others", "_quota", "_step", "_tie", "entries", "length", "outstanding", "parked")

    def __init__(self, length: int, quota: Callable[[int], int], *, newest_first: bool) -> None:
        """Make it empty.

        Args:
            length: how long a trial on it has trained.
            quota: how many of so many entries are the best ones; it grows by 0 or 1 with each entry.
            newest_first: among equal metrics the newest is the best; else the oldest is.
        """
        self.length = length
        self.outstanding = 0
        """How many trials are training towards it."""
        self.entries: dict[str, Key] = {}
        """Request id -> its place, in the order of arrival."""
        self.parked: dict[str, None] = {}
        """Those of the entries that may still be promoted."""
        self._quota = quota
        self._step = -1 if newest_first else 1
        self._tie = 0
        self._best: list[tuple[float, int, Trial]] = []
        self._others: list[tuple[float, int, Trial]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, trial: Trial, metric: float) -> Trial | None:
        """Enter a trial.

        Returns:
            The trial itself if it is among the best; else the last of the best if their number has grown; else None.
        """
        tie = self._tie = self._tie + self._step
        best, others = self._best, self._others
        self.entries[trial.request_id] = (metric, tie)
        grows = self._quota(len(self.entries)) > len(best)
        if best and (metric, tie) < (-best[0][0], -best[0][1]):
            if grows:
                heappush(best, (-metric, -tie, trial))
            else:
                worst = heapreplace(best, (-metric, -tie, trial))
                heappush(others, (-worst[0], -worst[1], worst[2]))
            return trial
        heappush(others, (metric, tie, trial))
        if not grows:
            return None
        last = heappop(others)
        heappush(best, (-last[0], -last[1], last[2]))
        return last[2]

    def remove(self, request_id: str) -> None:
        """Take a trial out as if it had never been here. That costs O(n log n), and is rare."""
        self.parked.pop(request_id, None)
        if self.entries.pop(request_id, None) is None:
            return
        everyone = [(-metric, -tie, trial) for metric, tie, trial in self._best] + self._others
        self._fill([entry for entry in everyone if entry[2].request_id != request_id])

    def ranked(self) -> list[str]:
        """The request ids, best first."""
        return sorted(self.entries, key=self.entries.__getitem__)

    def load(self, entries: list[tuple[Trial, float, int]], parked: list[str], outstanding: int) -> None:
        """Become what a snapshot says: trials with metric and tie in the order of arrival."""
        self.entries = {trial.request_id: (metric, tie) for trial, metric, tie in entries}
        self.parked = dict.fromkeys(parked)
        self.outstanding = outstanding
        self._fill([(metric, tie, trial) for trial, metric, tie in entries])

    @property
    def tie(self) -> int:
        """The number that the last entry got; it stays when that one is taken out."""
        return self._tie

    @tie.setter
    def tie(self, value: int) -> None:
        self._tie = value

    def _fill(self, everyone: list[tuple[float, int, Trial]]) -> None:
        everyone.sort(key=lambda entry: entry[:2])
        count = min(self._quota(len(everyone)), len(everyone))
        self._best = [(-metric, -tie, trial) for metric, tie, trial in everyone[:count]]
        self._others = everyone[count:]
        heapify(self._best)
