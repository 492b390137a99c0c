"""Which rows of a run count, after it was resumed: pure rules.

A run that is killed at step 80 and resumed from a checkpoint of step 50 reports steps 51 to 80 again. In each
group a row is superseded by a later restart that

- reported the same step, or
- whose first row in that group has the same or a smaller step, or
- restored a checkpoint of a smaller step.

Rows without a step never are. So a series has no step twice, and the superseded rows stay in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Supersession:
    """Decides for the rows of one run.

    Args:
        first: group -> restart -> the step of the restart's first row with a step in that group.
        restored: restart -> the smallest step of a checkpoint it restored.
    """

    def __init__(self, first: Mapping[str, Mapping[int, int]], restored: Mapping[int, int]) -> None:
        restarts = sorted({r for steps in first.values() for r in steps} | set(restored))
        # From a row's restart to the step from which on its rows are superseded.
        self._from: dict[str, dict[int, float]] = {}
        for group, steps in first.items():
            limit = float("inf")
            limits: dict[int, float] = {}
            for restart in reversed(restarts):
                limits[restart] = limit
                limit = min(limit, steps.get(restart, limit), restored.get(restart, limit) + 1)
            self._from[group] = limits

        self._first = first

    def first(self, group: str, restart: int) -> int:
        """The step of the restart's first row in the group; -1 where it has none."""
        return self._first.get(group, {}).get(restart, -1)

    def beyond(self, group: str, restart: int) -> float:
        """The step from which on this restart's rows of the group are superseded; infinite if none are."""
        return self._from.get(group, {}).get(restart, float("inf"))

    def superseded(self, group: str, restart: int, step: int | None, restarts_at_step: Iterable[int] = ()) -> bool:
        """Whether a row is superseded.

        Args:
            group: the row's group.
            restart: the restart it was made in.
            step: its step, or None.
            restarts_at_step: the restarts that reported this step in this group.
        """
        if step is None:
            return False
        return step >= self.beyond(group, restart) or any(r > restart for r in restarts_at_step)
