"""What the list says of a chain by its record and Slurm's listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.errors import RunNotFound
from det_core.journal import RunFolder
from det_core.slurm import Chain, describe, find_chain
from det_core.slurm._chain import JobRecord
from det_core.slurm._commands import QueuedJob
from det_core.slurm._policy import ChainEnd, JobEnd


@pytest.fixture
def chain(home: Path) -> Chain:
    """A chain with one job that has ended and one that runs."""
    chain = Chain.create(home, name="fit", command=["python", "fit.py"])
    end = JobEnd("preempted", 0, "time limit", is_newer=True)
    chain.save(JobRecord("7", 0, 1, "node1", 100.0, 0, None, 0, ended=160.0, end=end))
    chain.save(JobRecord("8", 0, 2, "node2", 163.0, 1, "a", 0))
    return chain


def queued(chain: Chain) -> list[QueuedJob]:
    other = QueuedJob("1", "RUNNING", "None", "node9", "other.abc.1")
    return [
        other,
        QueuedJob("9", "PENDING", "Dependency", "", chain.job_name(3)),
        QueuedJob("8", "RUNNING", "None", "node2", chain.job_name(2)),
    ]


def test_describe_shows_what_slurm_says_of_the_jobs(chain: Chain) -> None:
    view = describe(chain, queued(chain))
    assert (view.state, view.jobs) == ("9 PENDING (Dependency); 8 RUNNING node2", ("7", "8"))
    assert view.advice == ""


def test_describe_without_an_answer_of_slurm_is_unknown(chain: Chain) -> None:
    assert describe(chain, None).state == "unknown"


def test_describe_of_a_chain_without_jobs_says_how_to_go_on(chain: Chain) -> None:
    view = describe(chain, queued(chain)[:1])
    assert view.state == "broken off"
    assert f"to go on: sbatch --parsable --job-name={chain.job_name(3)}" in view.advice
    assert view.seconds == 60


def test_record_end_keeps_the_first_one_and_removes_the_environment(chain: Chain) -> None:
    chain.write("env.sh", b"export TOKEN=x\n")
    chain.record_end(ChainEnd("failed", "why"))
    chain.record_end(ChainEnd("done"))
    assert str(chain.end()) == describe(chain, []).state == "failed (why)"
    assert not chain.path("env.sh").exists()
    assert {path.stat().st_mode & 0o077 for path in [chain.folder, *chain.folder.iterdir()]} == {0}


def test_find_chain_takes_id_name_or_latest(chain: Chain, home: Path) -> None:
    for name in ("latest", chain.run_id, chain.run_id[:17], chain.name, "fit"):
        assert find_chain(home, name).folder == chain.folder
    with pytest.raises(RunNotFound):
        find_chain(home, "x")
    bare = RunFolder.create(home, name="bare")
    with pytest.raises(ValueError, match="has no chain of Slurm jobs"):
        find_chain(home, bare.run_id)
