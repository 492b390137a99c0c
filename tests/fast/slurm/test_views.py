"""The list of chains, from their records and Slurm's listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.errors import RunNotFound
from det_core.journal import RunFolder
from det_core.slurm import Chain, describe, find_chain
from det_core.slurm._commands import QueuedJob
from det_core.slurm._policy import JobRecord


@pytest.fixture
def chain(home: Path) -> Chain:
    """Return a chain with one job that has ended and one that runs."""
    chain = Chain.create(home, "fit", ["python", "fit.py"])
    chain.jobs = [JobRecord("preempted", 0, job="7", started=100.0, ended=160.0), JobRecord(job="8", started=163.0)]
    chain.save()
    return Chain(chain.folder)


def queued(chain: Chain) -> list[QueuedJob]:
    return [
        QueuedJob("1", "RUNNING", "None", "node9", "N/A", "other.abc"),
        QueuedJob("9", "PENDING", "Dependency", "", "N/A", chain.name),
        QueuedJob("8", "RUNNING", "None", "node2", "2026-11-28T03:00:01", chain.name),
    ]


def test_describe_shows_what_slurm_says_of_the_jobs(chain: Chain) -> None:
    view = describe(chain, queued(chain))
    state = "8 RUNNING node2; 9 PENDING (Dependency)"
    assert (view["state"], view["jobs"], view["advice"]) == (state, ["7", "8"], "")
    assert describe(chain, None)["state"] == "unknown"
    later = [QueuedJob(job, "PENDING", "Dependency", "", "N/A", chain.name) for job in ("10", "11")]
    assert describe(chain, [*queued(chain), *later])["state"] == f"{state} and 2 more"


def test_describe_of_a_chain_without_jobs_says_how_to_go_on(chain: Chain) -> None:
    view = describe(chain, queued(chain)[:1])
    assert view["state"] == "broken off"
    assert f"to continue it: sbatch --parsable --job-name={chain.name}" in view["advice"]
    assert view["seconds"] == 60


def test_save_of_the_end_removes_the_environment(chain: Chain) -> None:
    chain.write("env.sh", b"export TOKEN=x\n")
    chain.save("failed (why)")
    assert describe(Chain(chain.folder), [])["state"] == "failed (why)"
    assert not (chain.folder / "env.sh").exists()
    assert {path.stat().st_mode & 0o077 for path in [chain.folder, *chain.folder.iterdir()]} == {0}


def test_create_for_a_run_whose_chain_has_ended_begins_another_one(chain: Chain, home: Path) -> None:
    command = ["python", "fit.py"]
    with pytest.raises(ValueError, match=f"has not ended; to end it: det-core slurm cancel {chain.run_id}"):
        Chain.create(home, "fit", command, chain.run_id)
    chain.write("cancel", b"save")
    chain.save("cancelled")
    again = Chain.create(home, "fit", command, chain.run_id)
    assert again.run_path == chain.run_path
    assert (again.name, again.jobs, again.end, again.cancel_request) == (chain.name, [], "", "")
    with pytest.raises(RunNotFound):
        Chain.create(home, "fit", command, "no-such-run")


def test_find_chain_takes_id_name_job_or_latest(chain: Chain, home: Path) -> None:
    chain.write("submitted", b"7 8")
    for name in ("latest", chain.run_id, chain.run_id[:17], chain.name, "8"):
        assert find_chain(home, name).folder == chain.folder
    for name in ("x", "fit"):  # the name of a script, of which there may be several chains
        with pytest.raises(RunNotFound):
            find_chain(home, name)
    with pytest.raises(ValueError, match="has no chain of Slurm jobs"):
        find_chain(home, RunFolder.create(home, name="bare").run_id)
