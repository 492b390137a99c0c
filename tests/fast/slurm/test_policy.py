"""The decision after each job, by table."""

from __future__ import annotations

import pytest

from det_core.slurm._commands import CANCELLED, PREEMPTION
from det_core.slurm._policy import LOST, NOT_BEGUN, JobEnd, decide

STOPPED = JobEnd("preempted", 0, "time limit", is_newer=True)
STALLED = JobEnd("died", -15, "time limit")
BROKEN = JobEnd("failed", 1, error="ValueError: broken")
BROKEN_LATER = JobEnd("failed", 1, is_newer=True, error="ValueError: broken")
OTHERWISE_BROKEN = JobEnd("failed", 1, error="OSError: other")
KILLED = JobEnd("died", -9)
PREEMPTED = JobEnd("died", 143, PREEMPTION)
NODE_LOST = JobEnd("died", None, LOST)
GOES_ON = None


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([], GOES_ON),
        ([STOPPED], GOES_ON),
        ([STOPPED, JobEnd("completed", 0, is_newer=True)], "done"),
        ([JobEnd("completed", 0, "time limit")], "done"),
        ([JobEnd("completed", None, LOST)], "done"),
        ([JobEnd("stopped", 0)], "done (stopped)"),
        ([JobEnd("unclosed", 0)], "done (unclosed)"),
        ([JobEnd("incomplete", 0, "time limit", is_newer=True)], GOES_ON),
        ([JobEnd(NOT_BEGUN, 0)], "done (the script began no run)"),
        ([JobEnd(NOT_BEGUN, 0, "time limit")], GOES_ON),
        ([JobEnd(NOT_BEGUN, 127)], "failed (status 127; no checkpoint to go on from)"),
        ([JobEnd("preempted", 0, CANCELLED, is_newer=True)], "cancelled"),
        ([JobEnd("died", None, CANCELLED)], "cancelled"),
        ([JobEnd("completed", 0, CANCELLED)], "done"),
        ([BROKEN], "failed (status 1: ValueError: broken; no checkpoint to go on from)"),
        ([BROKEN_LATER], GOES_ON),
        ([BROKEN_LATER, BROKEN], GOES_ON),
        (
            [BROKEN_LATER, BROKEN, BROKEN],
            "failed (status 1: ValueError: broken; 2 times in a row without a newer checkpoint)",
        ),
        ([BROKEN_LATER, BROKEN, OTHERWISE_BROKEN], GOES_ON),
        ([BROKEN_LATER, BROKEN, OTHERWISE_BROKEN, BROKEN], "failed (3 jobs in a row left no newer checkpoint)"),
        ([BROKEN_LATER, BROKEN, PREEMPTED, BROKEN], GOES_ON),
        ([JobEnd("failed", 0)], "failed (status 0; no checkpoint to go on from)"),
        ([JobEnd("failed", 1, PREEMPTION)], GOES_ON),
        ([JobEnd("running", 1)], GOES_ON),
        ([JobEnd("failed", 137)], GOES_ON),
        ([KILLED], GOES_ON),
        ([KILLED, KILLED], GOES_ON),
        ([KILLED, KILLED, KILLED], "failed (3 jobs in a row left no newer checkpoint)"),
        ([STALLED, STALLED, STALLED], "failed (3 jobs in a row left no newer checkpoint)"),
        ([STALLED, PREEMPTED, NODE_LOST, STALLED], GOES_ON),
        ([PREEMPTED] * 5 + [NODE_LOST] * 4, GOES_ON),
        ([STALLED, STOPPED, STALLED, STALLED], GOES_ON),
        ([STOPPED] * 10, "unfinished (--max-jobs 10)"),
    ],
)
def test_decide_gives_the_end_of_a_chain_or_goes_on(ends: list[JobEnd], outcome: str | None) -> None:
    end = decide(ends, max_jobs=10)
    assert (None if end is None else str(end)) == outcome
