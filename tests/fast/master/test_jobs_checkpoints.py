"""Fate of real checkpoints: at an experiment's end, as a start for others, and when it is continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.errors import MasterError
from support.jobs import SINGLE, Jobs
from support.processes import until
from support.real_master import RealMaster

LOSSES = [[5.0, 3.0, 4.0, 6.0], [1.0, 9.0, 2.0, 8.0], [7.0, 7.0, 7.0, 7.0]]
"""By trial and step."""
SAVES = """
with begin() as ctx:
    step = load(ctx)
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            loss = hparams["losses"][hparams["number"]][step - 1]
            ctx.train.report_validation_metrics(step, {"loss": loss})
            save(ctx, step)
        op.report_completed(loss)
"""
TRAIN = """
with begin() as ctx:
    sign("start", f"{ctx.latest_checkpoint} {load(ctx)}")
    count(ctx)
"""


@pytest.fixture
def jobs(real: RealMaster) -> Iterator[Jobs]:
    made = Jobs(real)
    yield made
    made.close()


def test_the_checkpoints_that_stay_are_those_that_were_asked_for(jobs: Jobs) -> None:
    expected = {0: {2, 4}, 1: {1, 3, 4}, 2: {4}}
    experiment = jobs.create(
        SAVES,
        {"name": "grid", "metric": "loss", "max_length": 4},
        hyperparameters={"number": {"type": "categorical", "vals": [0, 1, 2]}, "losses": LOSSES},
        checkpoint_storage={
            "type": "directory",
            "container_path": str(jobs.home / "saved"),
            "save_experiment_best": 2,
            "save_trial_best": 1,
            "save_trial_latest": 1,
        },
    )
    trials = {trial.id: trial.hparams["number"] for trial in jobs.ended(experiment, "COMPLETED")}
    count = sum(len(steps) for steps in expected.values())

    def there() -> list[dict[str, object]] | None:
        found = [c for c in experiment.checkpoints() if c["state"] != "DELETED"]
        return found if len(found) == count else None

    kept: dict[int, set[int]] = {}
    for checkpoint in until(there, lambda: str(experiment.checkpoints())):
        folder = jobs.home / "saved" / str(checkpoint["uuid"])
        step = int((folder / "step").read_text())
        assert checkpoint["state"] == "COMPLETED"
        kept.setdefault(trials[int(str(checkpoint["training"]["trialId"]))], set()).add(step)  # type: ignore[index]
    assert kept == expected
    everything = experiment.checkpoints()
    assert len(everything) == 12
    left = {path.name for path in (jobs.home / "saved").iterdir()}
    assert {c["uuid"] for c in everything} & left == {c["uuid"] for c in everything if c["state"] == "COMPLETED"}


def test_a_warm_start_begins_from_a_checkpoint_of_another_trial(jobs: Jobs) -> None:
    with pytest.raises(MasterError, match="source_trial_id: there is no trial"):
        jobs.create(TRAIN, {**SINGLE, "source_trial_id": 10**6})
    (source,) = jobs.ended(jobs.create(TRAIN), "COMPLETED")
    assert jobs.sign("start") == "None 0"
    uuid = source.latest_checkpoint
    for start in ({"source_trial_id": source.id}, {"source_checkpoint_uuid": uuid}):
        (trial,) = jobs.ended(jobs.create(TRAIN, {**SINGLE, "max_length": 5, **start}), "COMPLETED")
        assert jobs.sign("start") == f"{uuid} 3"
        assert [run.steps_completed for run in jobs.runs(trial)] == [0], "its own count of steps begins at 0"
        assert jobs.steps(trial, "training") == [4, 5]
        assert trial.latest_checkpoint not in (None, uuid)


ELSEWHERE = """
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL, checkpoint_storage=hparams["named"]) as ctx:
    step = load(ctx)
    if ctx.latest_checkpoint is not None:
        ctx.checkpoint.download(ctx.latest_checkpoint, "copy")
        assert Path("copy", "step").read_text() == str(step)
        assert ctx.checkpoint.get_metadata(ctx.latest_checkpoint) == {"steps_completed": step}
    sign("start", f"{ctx.latest_checkpoint} {step}")
    count(ctx)
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_is_found_in_the_storage_that_it_was_made_in(jobs: Jobs, tmp_path: Path, named: bool) -> None:
    """A start from another experiment's, and a continuation; ``named``: the storage is the script's."""

    def storage(name: str) -> dict[str, object]:
        return {"type": "directory", "container_path": str(tmp_path / name), "save_trial_latest": 3}

    hparams = {"named": str(tmp_path / "named") if named else None}
    first = jobs.create(ELSEWHERE, hyperparameters=hparams, checkpoint_storage=storage("first"))
    (source,) = jobs.ended(first, "COMPLETED")
    assert jobs.sign("start") == "None 0"
    start = {**SINGLE, "max_length": 5, "source_trial_id": source.id}
    heir = jobs.create(ELSEWHERE, start, hyperparameters={"named": None}, checkpoint_storage=storage("heir"))
    (trial,) = jobs.ended(heir, "COMPLETED")
    assert jobs.sign("start") == f"{source.latest_checkpoint} 3"
    heir.go_on(["searcher.max_length=7"])
    (again,) = jobs.ended(heir, "COMPLETED")
    assert jobs.sign("start") == f"{trial.latest_checkpoint} 5"
    assert jobs.steps(again, "training") == [4, 5, 6, 7]
    for place, owner, step in (
        ("named" if named else "first", source, "3"),
        ("heir", trial, "5"),
        ("heir", again, "7"),
    ):
        assert (tmp_path / place / str(owner.latest_checkpoint)).is_dir()
        experiment = first if owner is source else heir
        fetched = experiment.download_checkpoint(tmp_path / "fetched" / step, owner.latest_checkpoint)
        assert (fetched / "step").read_text() == step


def test_what_another_experiment_starts_from_stays(jobs: Jobs, tmp_path: Path) -> None:
    script = """
with begin() as ctx:
    save(ctx, 1)
    sign("saved")
    while not (signs / "go").exists():
        time.sleep(0.01)
"""
    storage = {"type": "directory", "container_path": str(tmp_path / "saved")}
    nothing = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 0}
    source = jobs.create(script, checkpoint_storage={**storage, **nothing})
    jobs.sign("saved")
    (first,) = source.trials()
    uuid = until(lambda: first.refresh().latest_checkpoint, jobs.logs)
    later = {"resources": {"slots_per_trial": 2}, "checkpoint_storage": storage}
    heir = jobs.create(TRAIN, {**SINGLE, "source_checkpoint_uuid": uuid}, **later)
    (jobs.signs / "go").touch()
    jobs.ended(source, "COMPLETED")
    (trial,) = jobs.ended(heir, "COMPLETED")
    assert jobs.sign("start") == f"{uuid} 1"
    assert (tmp_path / "saved" / str(uuid) / "step").read_text() == "1"
    jobs.sign("go")
    assert trial.restarts == 0


def test_a_training_is_continued_for_longer(jobs: Jobs) -> None:
    experiment = jobs.create("with begin() as ctx:\n    count(ctx)\n")
    (trial,) = jobs.ended(experiment, "COMPLETED")
    first = trial.latest_checkpoint
    again = experiment.go_on(["searcher.max_length=6"])
    assert (again.state, again.config["searcher"]["max_length"]) == ("ACTIVE", 6)
    (longer,) = jobs.ended(experiment, "COMPLETED")
    assert (longer.id, longer.state, longer.steps_completed) == (trial.id, "COMPLETED", 6)
    assert [run.steps_completed for run in jobs.runs(trial)] == [0, 3]
    assert jobs.steps(trial, "training") == [1, 2, 3, 4, 5, 6]
    assert jobs.steps(trial, "validation") == [3, 6]
    assert longer.latest_checkpoint != first
    for change in ("hyperparameters.lr=1", "max_restarts=9", "searcher.metric=x"):
        with pytest.raises(MasterError, match="only max_length of a single trial's searcher can be changed"):
            experiment.go_on([change])


def test_what_has_failed_is_continued_from_where_it_was(jobs: Jobs) -> None:
    script = """
with begin() as ctx:
    if not (signs / "mended").exists():
        ctx.train.report_training_metrics(1, {"loss": 1.0})
        ctx.train.report_training_metrics(2, {"loss": 1.0})
        save(ctx, 1)
        raise SystemExit("there is a mistake in this script")
    count(ctx)
"""
    experiment = jobs.create(script, {"name": "random", "metric": "loss", "max_length": 3, "max_trials": 2})
    before = jobs.ended(experiment, "ERROR")
    assert [(t.state, t.latest_checkpoint is not None) for t in before] == [("ERROR", True)] * 2
    assert "there is a mistake in this script" in str(before[0].error)
    (jobs.signs / "mended").touch()
    experiment.go_on()
    after = jobs.ended(experiment, "COMPLETED")
    jobs.sign("mended")
    assert [t.id for t in after] == [t.id for t in before]
    for trial in after:
        assert (trial.state, trial.error) == ("COMPLETED", None)
        assert jobs.runs(trial) == [("failed", 1, 0), ("preempted", 0, 1)]
        assert jobs.steps(trial, "training") == [1, 2, 3]


DIES = """
import signal
from det_core.core._checkpoint import RunObserver

def die(events, *_):
    events._run.journal.flush()
    os.kill(os.getpid(), signal.SIGKILL)

first = not (signs / "died").exists()
if first and hparams["complete"]:
    RunObserver.on_committed = die
elif first:
    begun = RunObserver.on_committing
    RunObserver.on_committing = lambda *told: (begun(*told), die(*told))
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL, checkpoint_storage=hparams["saved"]) as ctx:
    sign("start", f"{ctx.latest_checkpoint} {load(ctx)}")
    if first:
        sign("died")
        save(ctx, 2)
    count(ctx)
"""


@pytest.mark.parametrize(("own", "complete"), [(False, True), (True, True), (False, False)])
def test_a_checkpoint_counts_from_the_moment_on_that_it_is_complete(
    jobs: Jobs, tmp_path: Path, own: bool, complete: bool
) -> None:
    """Its process is killed before it can say so; ``own``: in a storage that the script itself has named."""
    configured, named = tmp_path / "configured", tmp_path / "named"
    experiment = jobs.create(
        DIES,
        hyperparameters={"saved": str(named) if own else None, "complete": complete},
        checkpoint_storage={"type": "directory", "container_path": str(configured), "save_trial_best": 0},
        max_restarts=1,
    )
    (trial,) = jobs.ended(experiment, "COMPLETED")
    jobs.sign("died")
    saved = named if own else configured
    start = jobs.sign("start")
    found = {c["uuid"]: c for c in experiment.checkpoints()}
    assert trial.restarts == 1
    if complete:
        uuid = start.split()[0]
        assert start == f"{uuid} 2" and set(found) == {uuid, trial.latest_checkpoint}
        assert jobs.steps(trial, "training") == [3]
        assert found[uuid]["metadata"] == {"steps_completed": 2}
    else:
        assert start == "None 0" and set(found) == {trial.latest_checkpoint}
        assert jobs.steps(trial, "training") == [1, 2, 3]

    def left() -> bool:
        return [p.name for p in saved.iterdir() if not p.name.startswith(".")] == [trial.latest_checkpoint]

    until(left, lambda: str(list(saved.iterdir())))  # the master knows it, and lets it go in the end


UNCLOSED = """
ctx = begin()
count(ctx)
ctx.train.report_training_metrics(9, {"loss": 1.0})
with ctx.checkpoint.store_path({"steps_completed": 9}, blocking=False) as (path, _):
    (path / "step").write_text("9")
"""


def test_a_script_that_never_closes_has_saved_and_reported(jobs: Jobs) -> None:
    """Derive the outcome from the exit status alone."""
    experiment = jobs.create(UNCLOSED)
    (trial,) = jobs.ended(experiment, "COMPLETED")
    assert jobs.steps(trial, "training") == [1, 2, 3, 9]
    assert {c["metadata"]["steps_completed"] for c in experiment.checkpoints()} == {3, 9}
