"""Chains of jobs on real daemons: how they go on, what they go on after, and what ends them."""

from __future__ import annotations

import os
import re
import signal

import pytest

from support.chains import ChainOfTest, Cluster
from support.processes import until

MINUTE = ("--time", "1", "--stop-before", "15")
TWO_NODES = ("--nodes", "2", "--ranks-per-node", "2", "--cpus-per-task", "2")
WITH_WORKERS = """
import json, os, sys, time
import torch
from det_core import core

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return int(os.environ["TOTAL"])
    def __getitem__(self, i):
        time.sleep(0.2)
        return i

if __name__ == "__main__":
    with core.init(distributed=core.DistributedContext.detect()) as ctx:
        with ctx.checkpoint.resume() as path:
            done = json.loads((path / "step.json").read_text()) if path else 0
        left = torch.utils.data.Subset(Data(), range(done, len(Data())))
        loader = torch.utils.data.DataLoader(left, num_workers=2)
        for step, _ in enumerate(loader, done + 1):
            chief = ctx.distributed.rank == 0
            if chief:
                ctx.train.report_training_metrics(step, {"loss": 1 / step})
            stop = ctx.preempt.should_preempt()
            if chief and (stop or step == len(Data())):
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "step.json").write_text(json.dumps(step))
            if stop:
                sys.exit(0)
"""


def processes(cluster: Cluster, pattern: str) -> list[int]:
    """Return the processes on either node whose command matches."""
    found = {**cluster.slurm.hosts.processes(1), **cluster.slurm.hosts.processes(2)}
    return [pid for pid, command in found.items() if re.search(pattern, command)]


def stops(chain: ChainOfTest) -> list[str]:
    return [job.stop for job in chain.jobs() if job.state]


class TestTimeLimit:
    def test_chain_of_two_jobs_ends_by_itself_with_every_step_once(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="55", PAUSE="1")
        assert chain.wait_for_end() == "done"
        chain.show("two jobs")
        assert stops(chain) == ["time limit", ""]
        chain.check_every_step_once(55)
        assert not (chain.chain.folder / "env.sh").exists()
        assert "done" in cluster.run("det-core", "runs", "show", chain.chain.run_id).stdout

    @pytest.mark.parametrize("options", [(), TWO_NODES], ids=["one node", "two nodes"])
    @pytest.mark.parametrize("script", ["train.py", "workers.py"])
    def test_script_of_five_limits_ends_by_itself(
        self, cluster: Cluster, options: tuple[str, ...], script: str
    ) -> None:
        cluster.script("workers.py", WITH_WORKERS)
        chain = cluster.submit(*MINUTE, *options, command=["python", script], TOTAL="1000")
        assert chain.wait_for_end() == "done"
        chain.show(f"five limits, {script}, {options[:2]}")
        assert "TIME LIMIT" not in chain.log()
        chain.check_every_step_once(1000)


class TestKills:
    @pytest.mark.parametrize(
        ("victim", "options", "repeats"),
        [("train.py", (), True), (r"slurm job", (), False), (r"det_core.launch", TWO_NODES, True),
         (r"slurm job", TWO_NODES, True)],
        ids=["script", "program", "launcher", "program of two nodes"],
    )  # fmt: skip
    def test_kill_of_a_process_goes_on(
        self, cluster: Cluster, victim: str, options: tuple[str, ...], repeats: bool
    ) -> None:
        chain = cluster.submit("--time", "5", *options, TOTAL="60", EVERY="10")
        chain.wait_for_step(25)
        pattern = victim if victim.startswith("slurm") else f"^(?!.*slurm ).*{victim}"
        pids = processes(cluster, pattern)
        os.kill(pids[0], signal.SIGKILL)
        assert chain.wait_for_end() == "done"
        chain.show(f"kill of {victim}, {options[:2]}")
        assert len(chain.jobs()) == 2
        assert len(chain.rows()) == 60
        assert repeats or chain.repeated() == 0

    def test_death_of_slurmd_goes_on_on_the_other_node(self, cluster: Cluster) -> None:
        chain = cluster.submit("--time", "10", TOTAL="400", EVERY="10", PAUSE="0.3")
        chain.wait_for_step(15)
        host = chain.jobs()[0].host
        cluster.slurm.kill(host)
        try:
            chain.wait(lambda: len(chain.jobs()) == 2)
        finally:
            cluster.slurm.start(host)
        assert chain.wait_for_end() == "done"
        chain.show("slurmd killed")
        assert [row.steps_completed for row in chain.rows()] == list(range(1, 401))
        assert chain.jobs()[1].host != host


class TestStops:
    @pytest.mark.parametrize("attempt", range(int(os.environ.get("PREEMPTIONS", "1"))))
    def test_preemption_on_one_node_saves(self, cluster: Cluster, attempt: int) -> None:
        cluster.script("workers.py", WITH_WORKERS)
        chain = cluster.submit("--time", "5", "--partition", "low", "--sbatch", "exclusive",
                               command=["python", "workers.py"], TOTAL="60")  # fmt: skip
        chain.wait_for_step(10)
        cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        assert chain.wait_for_end() == "done"
        chain.show(f"preempted on one node, {attempt}")
        assert stops(chain) == ["preemption", ""]
        chain.check_every_step_once(60)

    def test_preemption_on_two_nodes_goes_on(self, cluster: Cluster) -> None:
        cluster.script("workers.py", WITH_WORKERS)
        chain = cluster.submit("--time", "5", "--partition", "low", "--sbatch", "exclusive", *TWO_NODES,
                               command=["python", "workers.py"], TOTAL="60")  # fmt: skip
        chain.wait_for_step(10)
        cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        assert chain.wait_for_end() == "done"
        chain.show("preempted on two nodes")
        assert stops(chain) == ["preemption", ""]
        chain.check_every_step_once(60)

    def test_requeue_by_an_administrator_counts_as_the_next_job(self, cluster: Cluster) -> None:
        chain = cluster.submit("--time", "5", TOTAL="60")
        chain.wait_for_step(10)
        job = chain.chain.submitted[0]
        cluster.run("scontrol", "update", f"jobid={job}", "requeue=1")
        cluster.run("scontrol", "requeue", job)
        until(lambda: "PENDING" in cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout)
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")
        assert chain.wait_for_end() == "done"
        chain.show("requeued")
        chain.check_every_step_once(60)

    def test_scancel_of_the_running_job_ends_the_chain(self, cluster: Cluster) -> None:
        chain = cluster.submit("--time", "5", TOTAL="600")
        chain.wait_for_step(10)
        cluster.run("scancel", chain.chain.submitted[0])
        assert chain.wait_for_end() == "cancelled"
        chain.show("scancel")
        assert len(chain.jobs()) == 1
        assert chain.checkpoint() is not None

    @pytest.mark.parametrize("options", [(), TWO_NODES], ids=["one node", "two nodes"])
    @pytest.mark.parametrize("now", [False, True])
    def test_cancel_ends_job_and_successor(self, cluster: Cluster, options: tuple[str, ...], now: bool) -> None:
        chain = cluster.submit("--time", "5", *options, TOTAL="600")
        chain.wait_for_step(10)
        said = cluster.det_core("cancel", chain.chain.run_id, *["--now"] * now).stdout
        assert f"cancelled run {chain.chain.run_id}\n" in said
        assert chain.wait_for_end() == "cancelled"
        chain.show(f"slurm cancel, now={now}, {options[:2]}")
        assert (chain.checkpoint() is None) is now


class TestController:
    def test_controller_away_when_a_job_starts_goes_on(self, cluster: Cluster) -> None:
        wait_for_go = "until [ -e go ]; do sleep 0.1; done"
        chain = cluster.submit(
            "--time", "2", "--stop-before", "40", "--setup", wait_for_go, TOTAL="240", PAUSE="0.5"
        )  # fmt: skip
        job = chain.chain.submitted[0]
        until(lambda: "RUNNING" in cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout)
        state = cluster.slurm.folder / "state" / "job_state"
        saved = state.stat().st_mtime if state.exists() else 0
        until(lambda: state.exists() and state.stat().st_mtime > saved)  # or the controller would know nothing of it
        cluster.slurm.kill("slurmctld")
        (cluster.folder / "go").touch()
        chain.wait_for_step(100)
        assert "the next job is not queued yet" in chain.log()
        cluster.slurm.start("slurmctld")
        assert chain.wait_for_end() == "done"
        chain.show("controller away at a start")
        assert len(chain.jobs()) == 2
        chain.check_every_step_once(240)

    def test_controller_away_when_a_job_ends_goes_on(self, cluster: Cluster) -> None:
        """Once at the end of a job that a next one follows, once when the run is done."""
        chain = cluster.submit("--time", "2", "--stop-before", "40", TOTAL="240", PAUSE="0.5")
        chain.wait_for_step(50)
        cluster.slurm.kill("slurmctld")
        chain.wait(lambda: chain.jobs()[0].ended)
        cluster.slurm.start("slurmctld")
        chain.wait_for_step(200)
        cluster.slurm.kill("slurmctld")
        chain.wait(lambda: "cannot cancel the next job" in chain.log())
        cluster.slurm.start("slurmctld")
        assert chain.wait_for_end() == "done"
        chain.show("controller away at two ends")
        assert len(chain.jobs()) == 2
        chain.check_every_step_once(240)


class TestFailures:
    def test_script_that_fails_at_once_has_one_job(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="20", FAIL_AT="3")
        assert chain.wait_for_end().startswith("failed (status 1: ValueError: broken at step 3")
        assert len(chain.jobs()) == 1

    def test_script_that_fails_after_each_checkpoint_has_three_jobs(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="30", EVERY="10", FAIL_AT="23")
        assert "2 times in a row" in chain.wait_for_end()
        chain.show("fails at step 23")
        assert len(chain.jobs()) == 3

    def test_script_that_never_saves_has_three_jobs(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="600", ASKS="0")
        assert chain.wait_for_end() == "failed (3 jobs in a row left no newer checkpoint)"
        chain.show("never saves")
        assert len(chain.jobs()) == 3
        assert "before that a signal ends a process at once" in chain.log()
