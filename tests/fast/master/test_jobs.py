"""Jobs under a real master, with real scripts: their possible ends, and the master's record (wire contract, §13)."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.jobs import Jobs, alive, kill_processes, supervisors
from support.processes import until
from support.real_master import RealMaster, real_master

ASHA = {
    "name": "async_halving",
    "metric": "loss",
    "max_length": 4,
    "num_rungs": 2,
    "divisor": 2,
    "max_trials": 2,
    "max_concurrent_trials": 1,
}
LR = {"lr": {"type": "double", "minval": 0.5, "maxval": 1.0}}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMaster]:
    """Yield a master with one slot."""
    with real_master(tmp_path_factory.mktemp("jobs") / "home", "--slots", "1") as master:
        yield master


@pytest.fixture
def jobs(single: RealMaster) -> Iterator[Jobs]:
    """Yield the jobs of a test on it."""
    with single.lent():
        made = Jobs(single)
        yield made
        made.close()


# The matrix of §13.4: how a script ends, and whether it has acknowledged a preemption.


def test_exit_0_without_ack_completes_the_trial(jobs: Jobs) -> None:
    """Even if its operation is not done."""
    experiment = jobs.create("with begin() as ctx:\n    ctx.train.report_training_metrics(1, {'loss': 1.0})\n")
    (trial,) = jobs.ended(experiment, "COMPLETED")
    assert (trial.state, trial.restarts, jobs.kinds(trial)) == ("COMPLETED", 0, [("stopped", 0)])


def test_exit_1_without_ack_is_tried_again_max_restarts_times(jobs: Jobs) -> None:
    script = "with begin() as ctx:\n    save(ctx, load(ctx) + 1)\nraise SystemExit(7)\n"
    (trial,) = jobs.ended(jobs.create(script, max_restarts=2), "ERROR")
    assert jobs.runs(trial) == [("failed", 7, 0), ("failed", 7, 1), ("failed", 7, 2)]
    assert (trial.state, trial.restarts) == ("ERROR", 2)
    assert "status 7" in str(trial.error)


WAIT = """
with begin() as ctx:
    if ctx.latest_checkpoint is None:
        sign("ready")
        while not ctx.preempt.should_preempt():
            time.sleep(0.005)
        save(ctx, 1)
        raise SystemExit(hparams["status"])
    count(ctx)
"""


def test_ack_of_a_pause_pauses_whatever_the_status(jobs: Jobs, status: int = 9) -> None:
    experiment = jobs.create(WAIT, hyperparameters={"status": status})
    jobs.sign("ready")
    experiment.pause()
    trial = jobs.until(experiment, "PAUSED")
    assert until(lambda: jobs.runs(trial), jobs.logs) == [("preempted", status, 0)]
    assert trial.restarts == 0
    experiment.activate()
    (trial,) = jobs.ended(experiment, "COMPLETED")
    assert jobs.runs(trial)[1] == ("preempted", 0, 1)
    assert (trial.restarts, trial.steps_completed) == (0, 3)


def test_ack_for_want_of_operations_parks_and_a_failure_after_it_counts(jobs: Jobs, status: int = 9) -> None:
    """Both trials train to the first rung, and then the better of them to the second; the other one is closed."""
    script = "with begin() as ctx:\n    count(ctx)\nraise SystemExit(hparams['status'])\n"
    seed = {"experiment_seed": 16}  # with it the first trial is the better one, and is parked
    hparams = {"status": status, **LR}
    experiment = jobs.create(script, ASHA, hyperparameters=hparams, reproducibility=seed, max_restarts=1)
    state = "ERROR" if status else "COMPLETED"
    trials = {trial.hparams["lr"]: trial for trial in jobs.ended(experiment, state)}
    better = trials[min(trials)]
    worse = trials[max(trials)]
    assert jobs.runs(worse) == [("preempted", status, 0)]
    assert jobs.runs(better) == [("preempted", status, 0), ("preempted", status, 2)]
    assert (better.state, better.restarts) == (state, int(status != 0)), "parked, and then in error"
    assert (worse.state, worse.restarts) == (state, 0)


def test_ack_that_nobody_asked_for_starts_again_and_counts_as_a_restart(jobs: Jobs, status: int = 9) -> None:
    script = "with begin() as ctx:\n    ctx.preempt.acknowledge_preemption_signal()\nraise SystemExit(STATUS)\n"
    (trial,) = jobs.ended(jobs.create(script.replace("STATUS", str(status)), max_restarts=1), "ERROR")
    assert jobs.kinds(trial) == [("preempted", status)] * 2
    assert trial.restarts == 1


# §13.3: how an end is classified.


def test_a_script_that_a_signal_ends_has_failed(jobs: Jobs) -> None:
    """And what it has reported, and its checkpoint, are there for the next run."""
    script = """
with begin() as ctx:
    if ctx.latest_checkpoint is None:
        ctx.train.report_training_metrics(1, {"loss": 1.0})
        save(ctx, 1)
        os.kill(os.getpid(), 9)
    count(ctx)
"""
    (trial,) = jobs.ended(jobs.create(script, max_restarts=1), "COMPLETED")
    assert jobs.runs(trial) == [("terminated", -signal.SIGKILL, 0), ("preempted", 0, 1)]
    assert trial.restarts == 1
    assert jobs.steps(trial, "training") == [1, 2, 3]


def test_a_machine_that_fails_is_not_the_scripts_fault(jobs: Jobs) -> None:
    """Kill the trial's supervisor: its processes are ended, and it starts again, without a restart."""
    script = """
with begin() as ctx:
    if not (signs / "again").exists():
        sign("script", os.getpid())
        signal.pause()
    count(ctx)
"""
    experiment = jobs.create(script)
    pid = int(jobs.sign("script"))
    (jobs.signs / "again").touch()
    kill_processes(supervisors(jobs.home, experiment.id))
    (trial,) = jobs.ended(experiment, "COMPLETED")
    jobs.sign("again")
    assert jobs.kinds(trial) == [("transient", None), ("preempted", 0)]
    assert trial.restarts == 0
    assert not alive(pid)


def test_a_startup_hook_that_fails_is_a_failure(jobs: Jobs) -> None:
    (trial,) = jobs.ended(jobs.create("count(None)", hook="echo no such package; exit 5\n"), "ERROR")
    assert jobs.kinds(trial) == [("failed", 5)]
    assert "startup-hook.sh exited with status 5" in str(trial.error)
    assert "no such package" in str(trial.error)


# A trial that ignores the request to stop.

DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with begin() as ctx:
    if not (signs / "again").exists():
        sign("ready", os.getpid())
        signal.pause()
    count(ctx)
"""


def test_a_trial_that_ignores_preemption_is_killed_when_its_time_is_over(jobs: Jobs) -> None:
    experiment = jobs.create(DEAF, preemption_timeout=1)
    pid = int(jobs.sign("ready"))
    (jobs.signs / "again").touch()
    experiment.pause()
    trial = jobs.until(experiment, "PAUSED")
    assert until(lambda: jobs.kinds(trial), jobs.logs) == [("killed", -signal.SIGKILL)]
    assert not alive(pid)
    experiment.activate()
    (trial,) = jobs.ended(experiment, "COMPLETED")
    jobs.sign("again")
    assert trial.restarts == 0


def test_cancel_lets_a_trial_save_and_an_error_meanwhile_is_an_error(jobs: Jobs) -> None:
    good = jobs.create(WAIT, hyperparameters={"status": 0})
    jobs.sign("ready")
    for _ in range(2):
        good.cancel()
    (trial,) = jobs.ended(good, "CANCELED")
    assert (trial.state, jobs.kinds(trial)) == ("CANCELED", [("preempted", 0)])
    assert trial.latest_checkpoint is not None
    bad = jobs.create(WAIT.replace("should_preempt()", "should_preempt(auto_ack=False)"), hyperparameters={"status": 9})
    jobs.sign("ready")
    bad.cancel()
    (trial,) = bad.trials() if bad.wait() else []
    assert (trial.state, jobs.kinds(trial)) == ("ERROR", [("failed", 9)])


def test_kill_ends_at_once_and_before_anything_has_started(jobs: Jobs) -> None:
    runs, waits = jobs.create(WAIT), jobs.create(WAIT)
    jobs.sign("ready")
    assert waits.trials()[0].state == "QUEUED"
    waits.kill()
    (trial,) = jobs.ended(waits, "CANCELED")
    assert (trial.state, jobs.kinds(trial)) == ("CANCELED", [])
    runs.kill()
    (trial,) = jobs.ended(runs, "CANCELED")
    assert (trial.state, trial.restarts) == ("CANCELED", 0)
    assert [kind for kind, _ in jobs.kinds(trial)] == ["killed"]
    runs.kill()  # ended is ended


CHILDREN = """
import subprocess, sys
sleep = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); signal.pause()"
here = subprocess.Popen(["sleep", "100"])
away = subprocess.Popen([sys.executable, "-S", "-c", sleep])  # a session of its own
daemon = "import subprocess; print(subprocess.Popen(['setsid', 'sleep', '100'], stdout=subprocess.DEVNULL).pid)"
orphan = subprocess.check_output([sys.executable, "-S", "-c", daemon], text=True).strip()  # its parent has ended
with begin() as ctx:
    sign("children", f"{here.pid} {away.pid} {orphan}")
    if hparams["lives"]:
        signal.pause()
"""


@pytest.mark.parametrize("lives", [False, True])
def test_no_child_of_a_trial_outlives_it(jobs: Jobs, lives: bool) -> None:
    """Nor does it keep the trial from ending, or change how its end is seen."""
    experiment = jobs.create(CHILDREN, hyperparameters={"lives": lives})
    pids = [int(word) for word in jobs.sign("children").split()]
    if lives:
        assert all(alive(pid) for pid in pids)
        experiment.kill()
    (trial,) = jobs.ended(experiment, "CANCELED" if lives else "COMPLETED")
    assert not any(alive(pid) for pid in pids)
    assert trial.restarts == 0
    if not lives:
        assert jobs.kinds(trial) == [("stopped", 0)]


# §13.4, the second row: the search has closed the trial.


@pytest.mark.parametrize(("status", "state"), [(0, "COMPLETED"), (3, "ERROR")])
def test_how_a_trial_ends_whose_last_operation_is_done(jobs: Jobs, status: int, state: str) -> None:
    script = """
with begin() as ctx:
    for op in ctx.searcher.operations():
        ctx.train.report_validation_metrics(op.length, {"loss": 0.5})
        op.report_completed(0.5)
        break
raise SystemExit(STATUS)
"""
    (trial,) = jobs.ended(jobs.create(script.replace("STATUS", str(status)), max_restarts=3), state)
    assert (trial.state, trial.best_metric) == (state, 0.5)
    assert [status for _, status in jobs.kinds(trial)] == [status]


# §13.5: hyperparameters that cannot be trained.

INVALID = """
from det_core import InvalidHP
try:
    with open(signs / "first", "x"):
        first = True
except FileExistsError:
    first = False
with begin() as ctx:
    if first:
        raise InvalidHP("this cannot be trained")
    count(ctx)
"""


def test_invalid_hp_is_replaced_by_a_new_trial(jobs: Jobs) -> None:
    experiment = jobs.create(INVALID, ASHA, hyperparameters=LR, max_restarts=3)
    first, *others = jobs.ended(experiment, "COMPLETED")
    jobs.sign("first")
    assert (first.state, first.restarts, len(jobs.runs(first))) == ("COMPLETED", 0, 1)
    assert first.best_metric is None
    assert [t.best_metric is not None for t in others] == [True, True], "two trials are measured, as asked for"
    assert len({t.hparams["lr"] for t in [first, *others]}) == 3
    assert sorted(t.steps_completed for t in others) == [2, 4]


# §13.7: two experiments, one slot.

YIELDS = """
with begin() as ctx:
    step = load(ctx)
    sign("ready", step)
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            ctx.train.report_training_metrics(step, {"loss": 1.0})
            while step == 1 and not ctx.preempt.should_preempt():
                time.sleep(0.005)
            if ctx.preempt.should_preempt():
                save(ctx, step)
                raise SystemExit(0)
        op.report_completed(1.0)
"""


def test_a_higher_priority_takes_the_slot_and_gives_it_back(jobs: Jobs) -> None:
    low = jobs.create(YIELDS, resources={"priority": 50})
    assert jobs.sign("ready") == "0"
    high = jobs.create("with begin() as ctx:\n    count(ctx)\n", resources={"priority": 10})
    (first,) = jobs.ended(high, "COMPLETED")
    (trial,) = jobs.ended(low, "COMPLETED")
    assert jobs.sign("ready") == "1", "it went on from where it was"
    assert jobs.runs(trial) == [("preempted", 0, 0), ("preempted", 0, 1)]
    assert (trial.restarts, trial.steps_completed) == (0, 3)
    assert jobs.spans(trial)[0][1] <= jobs.spans(first)[0][0] < jobs.spans(first)[0][1] <= jobs.spans(trial)[1][0]
