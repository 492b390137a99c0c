"""Pauses, ``kill -9`` of trials, of supervisors, of the master and of everything at once: the search goes on.

Real masters, engines and scripts. What must be so at the end is asked of the master.
"""

from __future__ import annotations

from pathlib import Path

from support.chaos_search import SMALL, calm_course, check, disturbed


def test_some_moments_on_one_slot(tmp_path: Path) -> None:
    calm = calm_course(tmp_path / "calm", SMALL)
    m, _ = disturbed(tmp_path / "disturbed", 1, 1, SMALL, ["trial", "reboot", "pause"], check(calm), longest=0.3)
    assert m.moments.total() == 3


def test_some_moments_on_two_slots(tmp_path: Path) -> None:
    m, _ = disturbed(tmp_path / "disturbed", 2, 2, SMALL, ["master", "trial"], check(None), longest=0.3)
    assert m.moments.total() >= 1
