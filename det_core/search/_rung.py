"""A rung: the metrics of the trials that got there, and which of them are among the best.

A decision asks one thing only: which entries are the best ``k``, where ``k`` follows from how many there are and grows
by one at most with each. So the best ``k`` are kept in one heap, worst on top, and the others in another one, best on
top: an entry costs O(log n), however many there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from det_core.search._trial import Trial

Key = tuple[float, int]
"""A metric, and a number that puts equal ones in order. The smallest is the best."""


class Rung:
    """One rung of a bracket."""

    __slots__ = (
        "_arrived", "_best", "_count", "_metrics", "_others", "_quota", "_step", "length", "number", "outstanding",
        "settled",
    )  # fmt: skip

    def __init__(self, number: int, length: int, quota: Callable[[int], int], *, newest_first: bool) -> None:
        """Make it empty.

        Args:
            number: how many rungs are below it in its bracket.
            length: how long a trial on it has trained.
            quota: how many of so many entries are the best ones; it grows by 0 or 1 with each entry.
            newest_first: among equal metrics the newest is the best; else the oldest is.
        """
        self.number, self.length = number, length
        self.outstanding = 0
        """How many trials are training towards it."""
        self.settled = False
        """Set it to know later whether anybody has been entered since."""
        self._quota = quota
        self._step = -1 if newest_first else 1
        # A trial's place is how many had arrived before it. The keys in the heaps hold no trial but tell its place:
        # so the garbage collector, which looks through all that refers to other objects, leaves them alone.
        self._arrived: list[Trial | None] = []
        self._metrics = array("d")
        self._count = 0
        self._best: list[Key] = []  # both parts negated
        self._others: list[Key] = []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, trial: Trial) -> bool:
        return trial.entered > self.number

    def add(self, trial: Trial, metric: float) -> Trial | None:
        """Enter a trial, which is on all rungs below.

        Returns:
            The trial itself if it is among the best; else the last of the best if their number has grown; else None.
        """
        self._arrived.append(trial)
        self._metrics.append(metric)
        self._count += 1
        self.settled = False
        trial.entered = self.number + 1
        best, others, tie = self._best, self._others, len(self._arrived) * self._step
        grows = self._quota(self._count) > len(best)
        if best and (-metric, -tie) > best[0]:
            if grows:
                heappush(best, (-metric, -tie))
            else:
                metric, tie = heapreplace(best, (-metric, -tie))
                heappush(others, (-metric, -tie))
            return trial
        heappush(others, (metric, tie))
        if not grows:
            return None
        metric, tie = heappop(others)
        heappush(best, (-metric, -tie))
        return self._arrived[abs(tie) - 1]

    def remove(self, trial: Trial) -> None:
        """Take a trial out as if it had never been here. That costs O(n log n), and is rare."""
        if trial in self:
            self._arrived[self._arrived.index(trial)] = None
            self._fill()

    def entries(self) -> list[tuple[Trial, float, int]]:
        """The trials with metric and tie, in the order of arrival."""
        return [(trial, self._metrics[place], (place + 1) * self._step) for place, trial in self._present()]

    def ranked(self) -> list[tuple[Trial, float]]:
        """The trials with their metrics, best first."""
        return [(trial, metric) for trial, metric, _ in sorted(self.entries(), key=lambda entry: entry[1:])]

    def parked(self) -> list[Trial]:
        """Those of its trials that went no further and may still train, in the order of arrival."""
        return [trial for _, trial in self._parked()]

    def parked_ranked(self) -> list[Trial]:
        """Those of :meth:`parked`, best first."""
        found = list(self._parked())[:: self._step]
        found.sort(key=lambda parked: self._metrics[parked[0]])
        return [trial for _, trial in found]

    def load(self, entries: list[tuple[Trial, float, int]], tie: int, outstanding: int) -> None:
        """Become what a snapshot says: trials with metric and tie in the order of arrival."""
        self._arrived = [None] * abs(tie)
        self._metrics = array("d", bytes(8 * abs(tie)))
        for trial, metric, own in entries:
            self._arrived[abs(own) - 1], self._metrics[abs(own) - 1] = trial, metric
            trial.entered = max(trial.entered, self.number + 1)
        self.outstanding, self.settled = outstanding, False
        self._fill()

    @property
    def tie(self) -> int:
        """The number that the last entry got; it stays when that one is taken out."""
        return len(self._arrived) * self._step

    def _present(self) -> Iterator[tuple[int, Trial]]:
        return ((place, trial) for place, trial in enumerate(self._arrived) if trial is not None)

    def _parked(self) -> Iterator[tuple[int, Trial]]:
        number = self.number
        return ((place, trial) for place, trial in self._present() if trial.rung == number and not trial.gone)

    def _fill(self) -> None:
        """Work out the best and the others anew."""
        keys = sorted((metric, tie) for _, metric, tie in self.entries())
        self._count = len(keys)
        count = min(self._quota(len(keys)), len(keys))
        self._best = [(-metric, -tie) for metric, tie in keys[:count]]
        self._others = keys[count:]
        heapify(self._best)
