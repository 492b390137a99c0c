"""The rules of superseding, against the sentences of the design read word by word."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from det_core.journal._supersede import Supersession

Report = tuple[int, str, int | None]
"""restart, group, step; in the order of reporting"""
Restore = tuple[int, int]
"""restart, step"""


def naive(reports: Sequence[Report], restores: Sequence[Restore], row: Report) -> bool:
    """Whether ``row`` is superseded."""
    restart, group, step = row
    if step is None:
        return False
    for later in {r for r, _, _ in reports} | {r for r, _ in restores}:
        if later <= restart:
            continue
        steps = [s for r, g, s in reports if (r, g) == (later, group) and s is not None]
        if steps and (steps[0] <= step or step in steps):
            return True
        if any(r == later and n < step for r, n in restores):
            return True
    return False


def rules(reports: Sequence[Report], restores: Sequence[Restore]) -> Supersession:
    first: dict[str, dict[int, int]] = {}
    for restart, group, step in reports:
        if step is not None:
            first.setdefault(group, {}).setdefault(restart, step)
    restored: dict[int, int] = {}
    for restart, step in restores:
        restored[restart] = min(step, restored.get(restart, step))
    return Supersession(first, restored)


reports = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("gh"), st.none() | st.integers(0, 9)), max_size=30)
restores = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


@given(reports, restores)
def test_the_rules_are_those_of_the_design(made: list[Report], restored: list[Restore]) -> None:
    decide = rules(made, restored)
    for row in made:
        restart, group, step = row
        at_step = {r for r, g, s in made if (g, s) == (group, step)}
        assert decide.superseded(group, restart, step, at_step) == naive(made, restored, row), row


@given(reports, restores)
def test_no_step_remains_twice(made: list[Report], restored: list[Restore]) -> None:
    left = {row for row in made if not naive(made, restored, row)}
    steps = [(group, step) for _, group, step in left if step is not None]
    assert len(steps) == len(set(steps))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_a_run_resumed_from_its_checkpoints_loses_no_step(restarts: list[tuple[int, int]]) -> None:
    """Each restart restores a step that was reached and goes on from there, one step at a time."""
    made: list[Report] = []
    restored: list[Restore] = []
    reached = 0
    for restart, (back, ahead) in enumerate(restarts):
        start = max(reached - back, 0)
        if restart:
            restored.append((restart, start))
        made += [(restart, "g", step) for step in range(start + 1, start + ahead + 1)]
        reached = start + ahead
    left = sorted(step for r, g, step in made if not naive(made, restored, (r, g, step)) and step is not None)
    assert left == list(range(1, reached + 1))
