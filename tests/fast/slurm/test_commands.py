"""Output of Slurm's commands and of a job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from det_core.slurm import SlurmError
from det_core.slurm._commands import run_slurm, stop_cause


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("slurmstepd: error: *** JOB 33 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", "cancelled"),
        ("slurmstepd: error: *** JOB 33 ON node2 CANCELLED AT 2026-11-28T03:00:00 DUE TO PREEMPTION ***", "preemption"),
        ("slurmstepd: error: *** JOB 33 ON n CANCELLED AT 2026-11-28T03:00:00 DUE TO TIME LIMIT ***", "time limit"),
        ("slurmstepd: error: *** STEP 33.0 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", ""),
        ("slurmstepd: error: *** JOB 34 ON node2 CANCELLED AT 2026-11-28T03:00:00 ***", ""),
    ],
)
def test_stop_cause_reads_the_line_of_the_job_alone(tmp_path: Path, log: str, cause: str) -> None:
    path = tmp_path / "log"
    path.write_text(f"before\n{log}\nafter\n")
    began = time.mktime((2026, 11, 28, 2, 59, 59, 0, 0, -1))
    assert stop_cause(path, "33", began) == cause
    assert stop_cause(path, "33", began + 2) == ""


def test_run_slurm_raises_the_words_of_the_command() -> None:
    with pytest.raises(SlurmError, match="sh: bad partition; batch job submission failed"):
        run_slurm("sh", "-c", "printf 'sh: bad partition\nsh: batch job submission failed\n' >&2; exit 1")
    with pytest.raises(SlurmError, match="a-command-of-slurm: not found; run this where"):
        run_slurm("a-command-of-slurm")
