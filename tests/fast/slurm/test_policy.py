"""The decision after each job, by table."""

from __future__ import annotations

import pytest

from det_core.slurm._commands import CANCELLED, PREEMPTION
from det_core.slurm._policy import LOST, NOT_BEGUN, JobRecord, decide

STOPPED = JobRecord("preempted", 0, "time limit", is_newer=True)
STALLED = JobRecord("died", -15, "time limit")
BROKEN = JobRecord("failed", 1, error="ValueError: broken")
BROKEN_LATER = JobRecord("failed", 1, is_newer=True, error="ValueError: broken")
OTHERWISE_BROKEN = JobRecord("failed", 1, error="OSError: other")
KILLED = JobRecord("died", -9)
PREEMPTED = JobRecord("died", 143, PREEMPTION)
NODE_LOST = JobRecord("died", None, LOST)
GOES_ON = ""
TWICE = "failed (status 1: ValueError: broken; 2 times in a row without a newer checkpoint)"
STALLS = "failed (3 jobs in a row left no newer checkpoint)"


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([], GOES_ON),
        ([STOPPED], GOES_ON),
        ([STOPPED, JobRecord("completed", 0, is_newer=True)], "done"),
        ([JobRecord("completed", 0, "time limit")], "done"),
        ([JobRecord("completed", None, LOST)], "done"),
        ([JobRecord("stopped", 0)], "done (stopped)"),
        ([JobRecord("unclosed", 0)], "done (unclosed)"),
        ([JobRecord("incomplete", 0, "time limit", is_newer=True)], GOES_ON),
        ([JobRecord(NOT_BEGUN, 0)], "done (before core.init())"),
        ([JobRecord(NOT_BEGUN, 0, "time limit")], GOES_ON),
        ([JobRecord(NOT_BEGUN, 127)], "failed (status 127; before the chain's first checkpoint)"),
        ([JobRecord("preempted", 0, CANCELLED, is_newer=True)], "cancelled"),
        ([JobRecord("died", None, CANCELLED)], "cancelled"),
        ([JobRecord("completed", 0, CANCELLED)], "done"),
        ([BROKEN], "failed (status 1: ValueError: broken; before the chain's first checkpoint)"),
        ([BROKEN_LATER], GOES_ON),
        ([BROKEN_LATER, BROKEN], GOES_ON),
        ([BROKEN_LATER, BROKEN, BROKEN], TWICE),
        ([BROKEN_LATER, BROKEN, OTHERWISE_BROKEN], GOES_ON),
        ([BROKEN_LATER, BROKEN, OTHERWISE_BROKEN, BROKEN], STALLS),
        ([BROKEN_LATER, BROKEN, PREEMPTED, BROKEN], GOES_ON),
        ([JobRecord("failed", 0)], "failed (status 0; before the chain's first checkpoint)"),
        ([JobRecord("failed", 1, PREEMPTION)], GOES_ON),
        ([JobRecord("running", 1)], GOES_ON),
        ([JobRecord("failed", 137)], GOES_ON),
        ([KILLED, KILLED], GOES_ON),
        ([KILLED, KILLED, KILLED], STALLS),
        ([STALLED, STALLED, STALLED], STALLS),
        ([STALLED, PREEMPTED, NODE_LOST, STALLED], GOES_ON),
        ([PREEMPTED] * 5 + [NODE_LOST] * 4, GOES_ON),
        ([STALLED, STOPPED, STALLED, STALLED], GOES_ON),
        ([STOPPED] * 10, "unfinished (--max-jobs 10)"),
    ],
)
def test_decide_gives_the_end_of_a_chain_or_goes_on(ends: list[JobRecord], outcome: str) -> None:
    assert decide(ends, max_jobs=10) == outcome
