"""Chains as a user sees them: early errors, the listing, the logs, secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from det_core.slurm import find_chain
from support.chains import ChainOfTest, Cluster
from support.hosts import NAMES
from support.processes import until

TOKEN = "token-of-the-submitter-4711"


def test_refusal_of_sbatch_is_one_line_and_leaves_nothing(cluster: Cluster) -> None:
    done = cluster.det_core("submit", "--partition", "gpux", "--", "python", "train.py", check=False)
    assert done.stderr.startswith("det-core: error: sbatch: error: invalid partition specified: gpux")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not list((cluster.home / "runs").iterdir())


def test_batch_file_of_ones_own_makes_run_and_chain(cluster: Cluster) -> None:
    options = ("--time", "1", "--stop-before", "15", "--", "python", "train.py")
    text = cluster.det_core("script", *options).stdout
    assert cluster.det_core("submit", "--dry-run", *options).stdout == text and not cluster.home.exists()
    cluster.script("mine.sh", text)
    cluster.run("sbatch", "mine.sh", TOTAL="240", PAUSE="0.2")
    until(lambda: "RUNNING node" in cluster.det_core("list").stdout)
    chain = ChainOfTest(cluster, find_chain(cluster.home, "latest"))
    assert chain.wait_for_end() == "done"
    chain.show("batch file of one's own")
    assert len(chain.jobs()) == 2
    chain.check_every_step_once(240)
    assert "started again (restart 1)" in cluster.det_core("logs", "latest").stdout


def test_home_that_the_node_does_not_see_is_named_by_list(cluster: Cluster) -> None:
    cluster.home.mkdir()
    for name in NAMES:
        cluster.slurm.inside(name, "mount", "-t", "tmpfs", "tmpfs", str(cluster.home))
    try:
        chain = cluster.submit(TOTAL="5")
        until(lambda: not cluster.slurm.jobs())
        said = cluster.det_core("list")
        job = chain.chain.submitted[0]
        assert f"job {job} never began: does node" in said.stderr and f"see {cluster.home}?" in said.stderr
        assert "broken off" in said.stdout
    finally:
        for name in NAMES:
            cluster.slurm.inside(name, "umount", str(cluster.home))


def test_chain_whose_successor_was_cancelled_is_broken_off_and_goes_on_by_the_command_shown(cluster: Cluster) -> None:
    chain = cluster.submit("--time", "5", TOTAL="50")
    chain.wait_for_step(10)
    pending = cluster.run("squeue", "-h", "-t", "PD", "-o", "%i").stdout.split()
    cluster.run("scancel", *pending)
    cluster.run("scancel", "--batch", "--signal=USR1", chain.chain.submitted[0])
    chain.wait(lambda: not cluster.slurm.jobs())
    listed = cluster.det_core("list")
    assert "broken off" in listed.stdout
    command = listed.stderr.partition("to continue it: ")[2].partition("; to end it")[0]
    cluster.run("sh", "-c", command)
    assert chain.wait_for_end() == "done"
    chain.check_every_step_once(50)


def test_submit_goes_on_with_the_run_of_a_cancelled_chain(cluster: Cluster) -> None:
    cancelled = cluster.submit("--time", "5", TOTAL="50")
    cancelled.wait_for_step(10)
    cluster.det_core("cancel", cancelled.chain.submitted[0])
    assert cancelled.wait_for_end() == "cancelled"
    run_id = cancelled.chain.run_id
    refused = cluster.det_core(
        "submit", "--partition", "gpux", "--", "python", "train.py", check=False, DET_CORE_RESUME=run_id
    )
    assert refused.returncode == 1 and cancelled.end() == "not submitted"
    chain = cluster.submit("--time", "5", TOTAL="50", DET_CORE_RESUME=run_id)
    assert chain.chain.run_id == run_id
    assert chain.wait_for_end() == "done"
    assert len(chain.jobs()) == 1
    chain.check_every_step_once(50)


def test_list_and_logs_show_all_jobs(cluster: Cluster) -> None:
    chain = cluster.submit("--time", "5", "--partition", "low", TOTAL="40")
    chain.wait_for_step(5)
    (view,) = json.loads(cluster.det_core("list", "--json").stdout)
    first = chain.chain.submitted[0]
    assert f"{first} RUNNING node" in view["state"] and "PENDING (Dependency)" in view["state"]
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    followed = cluster.det_core("logs", "-f", chain.chain.run_id).stdout
    assert chain.wait_for_end() == "done"
    assert followed.count("== job ") == 2 and "done; to look at it" in followed
    (view,) = json.loads(cluster.det_core("list", "--json").stdout)
    assert (view["state"], view["step"], len(view["jobs"])) == ("done", 40, 2)
    shown = cluster.run("det-core", "runs", "show", chain.chain.run_id).stdout
    assert f"done; jobs: {', '.join(view['jobs'])}" in shown


def test_chain_whose_jobs_may_not_submit_ends_unless_all_were_submitted_at_once(cluster: Cluster) -> None:
    wait_for_go = ("--setup", "until [ -e go ]; do sleep 0.1; done")
    alone = cluster.submit("--partition", "login", "--time", "5", *wait_for_go, TOTAL="400")
    several = cluster.submit("--partition", "login", "--time", "5", "--chain", "2", *wait_for_go, TOTAL="40")
    try:
        first = [alone.chain.submitted[0], several.chain.submitted[0]]
        until(lambda: set(cluster.run("squeue", "-h", "-t", "R", "-o", "%i").stdout.split()) == set(first))
        cluster.run("scontrol", "update", "partitionname=login", "state=inactive")
        (cluster.folder / "go").touch()
        alone.wait_for_step(5)
        several.wait_for_step(5)
        alone.wait(lambda: "where compute nodes may not submit jobs: det-core slurm submit --chain N" in alone.log())
        cluster.run("scancel", "--batch", "--signal=USR1", *first)
        until(lambda: first[0] not in cluster.slurm.jobs())  # its program tries once more at its end
    finally:
        cluster.run("scontrol", "update", "partitionname=login", "state=up")
    assert several.wait_for_end() == "done"
    assert [job.job for job in several.jobs()] == several.chain.submitted
    assert not alone.end() and "may not submit" not in several.log()


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_secrets_are_seen_nowhere(cluster: Cluster, nodes: str) -> None:
    chain = cluster.submit("--time", "5", "--nodes", nodes, "--ranks-per-node", "2", TOTAL="600", TOKEN=TOKEN)
    chain.wait_for_step(5)
    secret = (chain.chain.folder / "secret").read_text()
    job = chain.chain.submitted[0]
    seen = [
        cluster.run("squeue", "-o", "%all").stdout,
        cluster.run("scontrol", "show", "job", job).stdout,
        cluster.run("scontrol", "write", "batch_script", job, "-").stdout,
        *{**cluster.slurm.hosts.processes(1), **cluster.slurm.hosts.processes(2)}.values(),
        chain.log(),
        *(path.read_text(errors="replace") for path in Path(cluster.slurm.folder).rglob("*") if path.is_file()),
    ]
    assert not [text for text in seen if TOKEN in text or secret in text]
    cluster.det_core("cancel", "--now", chain.chain.run_id)
    assert chain.wait_for_end() == "cancelled"
    assert not [path for path in chain.chain.folder.iterdir() if TOKEN in path.read_text(errors="replace")]
