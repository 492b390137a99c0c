"""The rules of superseding, against the sentences of the design read word by word."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from det_core.journal import read_run
from support.journals import open_journal

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


def read_back(reports: Sequence[Report], restores: Sequence[Restore], *, superseded: bool) -> set[tuple[Report, bool]]:
    """Return the rows of a run with these reports and restores, and whether each is superseded."""
    with tempfile.TemporaryDirectory() as name:
        for restart in sorted({r for r, *_ in [*reports, *restores]}):
            journal = open_journal(Path(name), restart=restart)
            for r, step in restores:
                if r == restart:
                    journal.record("restore", {"storage_id": "x", "steps_completed": step})
            for r, group, reported in reports:
                if r == restart:
                    journal.metrics(group, reported, {"restart": r})
            journal.close()
        run = read_run(name) if reports or restores else None
        groups = run.groups() if run else []
        rows = [row for group in groups if run for row in run.rows(group, superseded=superseded)]
    found = [((row.restart, row.group, row.steps_completed), row.superseded) for row in rows]
    steps = [row for row, _ in found if row[2] is not None]
    assert len(steps) == len(set(steps)), "a step occurs twice in a restart"
    return set(found)


reports = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("gh"), st.none() | st.integers(0, 9)), max_size=30)
restores = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


@given(reports, restores)
def test_superseding_follows_a_reference_implementation(made: list[Report], restored: list[Restore]) -> None:
    expected = {(row, naive(made, restored, row)) for row in made}
    assert read_back(made, restored, superseded=True) == expected


@given(reports, restores)
def test_series_has_no_step_twice(made: list[Report], restored: list[Restore]) -> None:
    left = read_back(made, restored, superseded=False)
    assert left == {(row, False) for row in made if not naive(made, restored, row)}
    steps = [(group, step) for (_, group, step), _ in left if step is not None]
    assert len(steps) == len(set(steps))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_run_resumed_from_checkpoints_loses_no_step(restarts: list[tuple[int, int]]) -> None:
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
    left = sorted(step for (_, _, step), _ in read_back(made, restored, superseded=False) if step is not None)
    assert left == list(range(1, reached + 1))
