"""Who called what: finds out that ranks disagree. Pure; a lane feeds it what it does itself and what it hears.

On one lane every rank makes the same calls in the same order, so the n-th call has one name. A roll remembers the
first name heard for each number that is not over yet, and says so when somebody calls it differently.
"""

from __future__ import annotations

from collections.abc import Callable

from det_core.ipc._frames import Call, Op


class Disagreement(Exception):
    """Two ranks made different calls of the same number."""

    def __init__(self, calls: dict[int, Call]) -> None:
        self.calls = calls
        super().__init__(self.text(lambda rank: rank))

    def text(self, name: Callable[[int], int]) -> str:
        """Who called what, for people; ``name`` gives a rank's number in the job."""
        said = ", ".join(f"rank {name(rank)} called {call}" for rank, call in sorted(self.calls.items()))
        return f"the ranks disagree: {said}. Every rank must make the same collective calls in the same order"


class Roll:
    """The calls of one lane, as one rank knows them.

    Thread-safe without a lock: each method is one atomic dictionary operation deep.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.number = 0
        """The last call made here."""
        self._last: dict[int, tuple[Op, int]] = {}
        self._names: dict[int, tuple[Op, int]] = {}

    def enter(self, rank: int, op: Op) -> Call:
        """This rank, ``rank``, makes its next call.

        Raises:
            Disagreement: another rank is known to call something else with that number.
        """
        number = self.number + 1
        self._names.pop(self.number, None)
        self.number = number
        self._note(rank, op, number)
        return Call(self.lane, op, number)

    def hear(self, rank: int, op: Op, number: int) -> bool:
        """Rank ``rank`` has made (or answered) the call ``number``.

        Returns:
            Whether it is about the call under way here or a later one; False: that call is over here.

        Raises:
            Disagreement: it is not what others called with that number.
        """
        if number < self.number:
            return False
        self._note(rank, op, number)
        return True

    def last(self, rank: int) -> Call | None:
        """The last call of ``rank`` that was heard of."""
        known = self._last.get(rank)
        return None if known is None else Call(self.lane, *known)

    def _note(self, rank: int, op: Op, number: int) -> None:
        self._last[rank] = (op, number)
        said, first = self._names.setdefault(number, (op, rank))
        if said is not op:
            raise Disagreement({first: Call(self.lane, said, number), rank: Call(self.lane, op, number)})
