"""The rows of how a job may end that `make test` does not have."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from fast.master import test_jobs as short
from fast.master.test_jobs import jobs, single
from support.jobs import Jobs

__all__ = ["jobs", "single"]


@pytest.mark.parametrize(
    "check",
    [
        short.test_ack_of_a_pause_pauses_whatever_the_status,
        short.test_ack_for_want_of_operations_parks_and_a_failure_after_it_counts,
        short.test_ack_that_nobody_asked_for_starts_again_and_counts_as_a_restart,
    ],
)
def test_an_ack_counts_with_status_0_too(jobs: Jobs, check: Callable[[Jobs, int], None]) -> None:
    check(jobs, 0)


def test_one_that_gave_up_and_lives_on_is_killed(jobs: Jobs) -> None:
    script = """
with begin() as ctx:
    ctx.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
    signal.pause()
"""
    experiment = jobs.create(script)
    experiment.wait()
    (trial,) = experiment.trials()
    assert (trial.state, [kind for kind, _ in jobs.kinds(trial)]) == ("CANCELED", ["killed"])


def test_equal_priorities_wait_for_each_other(jobs: Jobs) -> None:
    script = "with begin() as ctx:\n    count(ctx)\n"
    found = [jobs.create(script, resources={"priority": 50}) for _ in range(3)]
    spans = [jobs.spans(trial) for experiment in found for trial in jobs.ended(experiment, "COMPLETED")]
    assert [len(s) for s in spans] == [1, 1, 1]
    assert spans == sorted(spans), "the first comes first"
    assert all(a[0][1] <= b[0][0] for a, b in pairwise(spans)), "one at a time"
