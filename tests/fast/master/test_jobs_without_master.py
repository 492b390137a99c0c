"""Reports of a trial while no master is there."""

from __future__ import annotations

from pathlib import Path

from support.jobs import Jobs
from support.processes import suspend, until
from support.real_master import real_master

SCRIPT = """
with begin() as ctx:
    sign("pid", os.getpid())
    while not (signs / "report").exists():
        time.sleep(0.01)
    for step in range(1, 6):
        ctx.train.report_training_metrics(step, {"loss": 1.0})
    signal.pause()
"""


def test_the_next_master_knows_it_before_the_trial_has_found_that_master(tmp_path: Path) -> None:
    with real_master(tmp_path / "home", "--slots", "1") as real:
        jobs = Jobs(real)
        try:
            experiment = jobs.create(SCRIPT)
            pid = int(jobs.sign("pid"))
            real.kill()
            (jobs.signs / "report").touch()
            journals = lambda: "".join(p.read_text() for p in jobs.home.rglob("journal-*.jsonl"))  # noqa: E731
            until(lambda: '"steps_completed":5' in journals(), journals)
            suspend(pid)  # it ships nothing itself
            real.start()
            until(lambda: experiment.trials()[0].steps_completed == 5, lambda: str(experiment.trials()[0].info))
        finally:
            jobs.close()
