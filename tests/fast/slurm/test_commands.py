"""What Slurm's commands and a job's output say."""

from __future__ import annotations

import pytest

from det_core.slurm import SlurmError
from det_core.slurm._commands import parse_time, run_slurm, stop_cause


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("slurmstepd: error: *** JOB 33 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", "cancelled"),
        ("slurmstepd: error: *** JOB 33 ON node2 CANCELLED AT 2026-11-28T03:00:00 DUE TO PREEMPTION ***", "preemption"),
        ("slurmstepd: error: *** JOB 33 ON n CANCELLED AT 2026-11-28T03:00:00 DUE TO TIME LIMIT ***", "time limit"),
        ("slurmstepd: error: *** STEP 33.0 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", None),
        ("slurmstepd: error: *** JOB 34 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", None),
    ],
)
def test_stop_cause_reads_the_line_of_the_job_alone(log: str, cause: str | None) -> None:
    assert stop_cause(f"before\n{log}\nafter\n", "33") == cause


def test_parse_time_of_no_time_is_none() -> None:
    assert parse_time("NONE") is None
    assert parse_time("2026-11-28T03:00:01") == (parse_time("2026-11-28T03:00:00") or 0) + 1


def test_run_slurm_raises_the_words_of_the_command() -> None:
    with pytest.raises(SlurmError, match="sh: bad partition; batch job submission failed"):
        run_slurm("sh", "-c", "printf 'sh: bad partition\nsh: batch job submission failed\n' >&2; exit 1")
    with pytest.raises(SlurmError, match="a-command-of-slurm: not found; run this where"):
        run_slurm("a-command-of-slurm")
