"""Chains of jobs on real daemons: how they go on, what they go on after, and what ends them."""

from __future__ import annotations

import os
import re
import signal

import pytest

from support.chains import ChainOfTest, Cluster, show_python
from support.processes import until

Words = tuple[str, ...]
USER = 5  # games: a system user of Debian that owns nothing
MINUTE = ("--time", "1", "--stop-before", "15")
TWO_NODES = ("--nodes", "2", "--ranks-per-node", "2", "--cpus-per-task", "2")


def stops(chain: ChainOfTest) -> list[str]:
    return [job.stop for job in chain.jobs() if job.state]


class TestTimeLimit:
    def test_chain_of_two_jobs_ends_by_itself_with_every_step_once(self, cluster: Cluster) -> None:
        """Run it as a user who is not root."""
        show_python(cluster.slurm)
        cluster.folder.chmod(0o777)
        user = Cluster(cluster.slurm, cluster.folder, USER)
        # With a setup, as the user can run this Python on the nodes alone, and submit would refuse the command.
        chain = user.submit(*MINUTE, "--setup", "true", TOTAL="55", PAUSE="1")
        assert chain.wait_for_end() == "done"
        chain.show("two jobs")
        assert stops(chain) == ["time limit", ""]
        chain.check_every_step_once(55)
        assert oct(chain.chain.folder.stat().st_mode & 0o777) == "0o700"
        assert oct((chain.chain.folder / "secret").stat().st_mode & 0o777) == "0o600"
        assert not (chain.chain.folder / "env.sh").exists()
        assert "done" in user.run("det-core", "runs", "show", chain.chain.run_id).stdout

    @pytest.mark.parametrize("options", [(), TWO_NODES], ids=["one node", "two nodes"])
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_script_of_five_limits_ends_by_itself(self, cluster: Cluster, options: Words, workers: str) -> None:
        chain = cluster.submit(*MINUTE, *options, TOTAL="1000", WORKERS=workers)
        assert chain.wait_for_end() == "done"
        chain.show(f"five limits, {workers} workers, {options[:2]}")
        assert "TIME LIMIT" not in chain.log()
        chain.check_every_step_once(1000)

    def test_script_that_does_not_end_in_time_goes_on_from_its_last_checkpoint(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="500", EVERY="100", ASKS="0", DEAF="1")
        assert chain.wait_for_end() == "done"
        chain.show("killed at the time limit")
        assert stops(chain) == ["time limit", ""]
        assert len(chain.rows()) == 500


class TestKills:
    @pytest.mark.parametrize(
        ("victim", "options"),
        [("^python train", ()), ("slurm job", ()), (r"^\S+ -m det_core.launch", TWO_NODES), ("slurm job", TWO_NODES)],
    )
    def test_kill_of_a_process_goes_on(self, cluster: Cluster, victim: str, options: Words) -> None:
        chain = cluster.submit("--time", "5", *options, TOTAL="60", EVERY="10")
        chain.wait_for_step(25)
        found = {**cluster.slurm.hosts.processes(1), **cluster.slurm.hosts.processes(2)}
        os.kill(next(pid for pid, command in found.items() if re.search(victim, command)), signal.SIGKILL)
        assert chain.wait_for_end() == "done"
        chain.show(f"kill of {victim}, {options[:2]}")
        assert len(chain.jobs()) == 2
        assert len(chain.rows()) == 60
        assert chain.repeated() == 0 or (victim, options) != ("slurm job", ())

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
    @pytest.mark.parametrize("options", [()] * int(os.environ.get("PREEMPTIONS", "1")) + [TWO_NODES])
    def test_preemption_saves_and_goes_on(self, cluster: Cluster, options: Words) -> None:
        chain = cluster.submit("--time", "5", "--partition", "low", "--sbatch", "exclusive", *options,
                               TOTAL="60", WORKERS="2")  # fmt: skip
        chain.wait_for_step(10)
        cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        assert chain.wait_for_end() == "done"
        chain.show(f"preempted, {options[:2]}")
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

    @pytest.mark.parametrize("options", [(), TWO_NODES], ids=["one node", "two nodes"])
    @pytest.mark.parametrize("command", ["scancel", "cancel", "cancel --now"])
    def test_cancel_ends_job_and_successor(self, cluster: Cluster, options: Words, command: str) -> None:
        chain = cluster.submit("--time", "5", *options, TOTAL="600")
        chain.wait_for_step(10)
        if command == "scancel":
            cluster.run("scancel", chain.chain.submitted[0])
        else:
            output = cluster.det_core(*command.split(), chain.chain.run_id).stdout
            assert f"cancelled run {chain.chain.run_id}\n" in output
        assert chain.wait_for_end() == "cancelled"
        chain.show(f"{command}, {options[:2]}")
        assert len(chain.jobs()) == 1
        assert (chain.checkpoint() is None) is (command == "cancel --now")


def test_controller_away_for_a_minute_at_the_start_and_the_end_of_jobs_goes_on(cluster: Cluster) -> None:
    wait_for_go = "until [ -e go ]; do sleep 0.1; done"
    chain = cluster.submit("--time", "3", "--stop-before", "40", "--setup", wait_for_go, TOTAL="400", PAUSE="0.5")
    until(lambda: "RUNNING" in cluster.run("squeue", "-h", "-o", "%T").stdout)
    state = cluster.slurm.folder / "state" / "job_state"
    saved = state.stat().st_mtime if state.exists() else 0
    until(lambda: state.exists() and state.stat().st_mtime > saved)  # or the controller would know nothing of the job
    cluster.slurm.kill("slurmctld")
    (cluster.folder / "go").touch()
    chain.wait_for_step(120)
    assert "the next job is not queued yet" in chain.log()
    cluster.slurm.start("slurmctld")
    chain.wait(lambda: "PENDING" in cluster.run("squeue", "-h", "-o", "%T", check=False).stdout)
    cluster.slurm.kill("slurmctld")
    chain.wait(lambda: chain.jobs()[0].ended)
    cluster.slurm.start("slurmctld")
    chain.wait_for_step(340)
    cluster.slurm.kill("slurmctld")
    chain.wait(lambda: "cannot cancel the next job" in chain.log())
    cluster.slurm.start("slurmctld")
    assert chain.wait_for_end() == "done"
    chain.show("controller away at a start and at two ends")
    assert len(chain.jobs()) == 2
    chain.check_every_step_once(400)


class TestFailures:
    @pytest.mark.parametrize(
        ("step", "every", "reason", "jobs"),
        [("3", "0", "before the chain's first checkpoint", 1),
         ("23", "10", "2 times in a row without a newer checkpoint", 3)],
    )  # fmt: skip
    def test_script_that_fails_by_itself_ends_the_chain(
        self, cluster: Cluster, step: str, every: str, reason: str, jobs: int
    ) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="30", FAIL_AT=step, EVERY=every)
        assert chain.wait_for_end() == f"failed (status 1: ValueError: broken at step {step}; {reason})"
        assert len(chain.jobs()) == jobs

    def test_script_that_never_saves_has_three_jobs(self, cluster: Cluster) -> None:
        chain = cluster.submit(*MINUTE, TOTAL="600", ASKS="0")
        assert chain.wait_for_end() == "failed (3 jobs in a row left no newer checkpoint)"
        chain.show("never saves")
        assert len(chain.jobs()) == 3
        assert "until which a signal ends the process at once" in chain.log()
