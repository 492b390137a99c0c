"""A context under a foreign master, of each generation: what it says to the master, in which order and shape."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import InvalidHP, core
from det_core.errors import CheckpointNotFound, MasterDenied, MasterError, ReportsNotShipped
from det_core.journal import Cursor
from support.foreign_master import ForeignMaster, foreign_master
from support.managed import opened
from support.processes import until

OLD, MIDDLE, NEW = "0.36.0", "0.37.0", "0.38.1"


@pytest.fixture(params=[OLD, MIDDLE, NEW])
def master(request: pytest.FixtureRequest) -> Iterator[ForeignMaster]:
    with foreign_master(request.param) as found:
        yield found


@pytest.fixture
def new() -> Iterator[ForeignMaster]:
    with foreign_master(NEW) as found:
        yield found


def test_trial_sends_requests_from_start_to_end(
    master: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = master.add_trial(lengths=(3, 6))
    lengths, made = [], []
    with opened(master, trial, tmp_path, monkeypatch) as ctx:
        assert ctx.info is not None and ctx.info.trial.hparams == {"lr": 0.5}
        assert ctx.latest_checkpoint is None
        assert ctx.searcher.get_configured_units() is core.Unit.BATCHES
        step = 0
        for op in ctx.searcher.operations():
            lengths.append(op.length)
            while step < op.length:
                step += 1
                ctx.train.report_training_metrics(step, {"loss": float("nan")}, [{"loss": 0.5}])
                op.report_progress(step)
            ctx.train.report_validation_metrics(step, {"loss": 1 / step})
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, storage_id):
                (path / "model").write_text("x" * step)
            made.append(storage_id)
            op.report_completed(1 / step)
        assert ctx.train.get_experiment_best_validation() == pytest.approx(1 / 6)
    operations = master.release < (0, 38)
    assert lengths == ([3, 6] if operations else [6])
    assert trial.completed == ([(3, 1 / 3), (6, 1 / 6)] if operations else [])
    assert master.acks == ([trial.allocation_id] if operations else [])
    training = [r for r in trial.rows if r["group"] == "training"]
    assert [r["steps"] for r in training] == [1, 2, 3, 4, 5, 6]
    assert training[0]["avg"] == {"loss": "NaN"} and training[0]["batches"] == [{"loss": 0.5}]
    shapes: dict[str, list[Any]] = {
        OLD: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        MIDDLE: [{"progress": float(n)} for n in range(1, 7)],
        NEW: [{"progress": n / 6, "is_raw": True} for n in range(1, 7)],
    }
    assert trial.progress == shapes[master.version]
    assert list(master.checkpoints) == made
    last = master.checkpoints[made[-1]]
    assert last["rows"] == {1: len(trial.rows)}, "a row came after the checkpoint that follows it"
    assert last["resources"] == {"model": "6", "metadata.json": last["resources"]["metadata.json"]}
    assert (last["taskId"], last["allocationId"], last["storageId"]) == (trial.task_id, trial.allocation_id, 1)
    assert all(asked.allocation is (master.release >= (0, 37)) for asked in master.seen if "master" not in asked.path)
    assert (tmp_path / "store" / made[-1] / "model").read_text() == "xxxxxx"


@pytest.mark.parametrize(
    ("searcher", "arguments", "warned"),
    [
        ({"metric": "accuracy"}, {"searcher_metric": "accuracy", "smaller_is_better": False}, True),
        ({"metric": "accuracy", "smaller_is_better": True}, {"smaller_is_better": False}, True),
        (
            {"metric": "accuracy", "smaller_is_better": False},
            {"searcher_metric": "accuracy", "smaller_is_better": False},
            False,
        ),
        ({"metric": "accuracy", "smaller_is_better": False}, {"searcher_metric": "accuracy"}, False),
        ({"metric": "loss"}, {"searcher_metric": "accuracy", "smaller_is_better": False}, False),
    ],
)
def test_init_opposite_smaller_is_better_warns_once(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    searcher: dict[str, Any], arguments: dict[str, Any], warned: bool,
) -> None:  # fmt: skip
    trial = new.add_trial(config={"searcher": {"name": "single", "max_length": {"batches": 1}, **searcher}})
    with opened(new, trial, tmp_path, monkeypatch, **arguments) as ctx:
        assert ctx.searcher.smaller_is_better is searcher.get("smaller_is_better", True)  # the configuration's word
    said = [record.getMessage() for record in caplog.records if "smaller_is_better" in record.getMessage()]
    assert len(said) == warned
    assert not warned or "contradicts the experiment, which minimizes accuracy" in said[0]


def test_requests_are_answered_by_the_master(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        assert ctx.train.get_experiment_best_validation() is None
        assert ctx.train.get_metadata() == {}
        assert ctx.train.set_metadata({"a": [1, None]}) == {"a": [1, None]} == ctx.train.get_metadata()
        ctx.train.set_status("warming up")
        ctx.train.report_progress(0.25)
        ctx.alert("title", "text", "warn")
        with ctx.checkpoint.store_path({"steps_completed": 1, "mine": True}) as (path, storage_id):
            (path / "f").write_text("f")
        new.checkpoints[storage_id]["metadata"] = {"steps_completed": 1, "edited": True}
        assert ctx.checkpoint.get_metadata(storage_id) == {"steps_completed": 1, "edited": True}
        del new.checkpoints[storage_id]
        assert ctx.checkpoint.get_metadata(storage_id) == {"steps_completed": 1, "mine": True}, "not from the store"
        with pytest.raises(CheckpointNotFound):
            ctx.checkpoint.get_metadata("another")
        ctx.checkpoint.delete(storage_id)
        with ctx.checkpoint.store_path({"steps_completed": 2}) as (path, storage_id):
            (path / "f").write_text("f")
        ctx.checkpoint.delete(storage_id)
        assert new.checkpoints[storage_id]["state"] == "STATE_DELETED"
    assert trial.states == ["warming up"]
    assert trial.progress == [{"progress": 0.25, "is_raw": True}]
    assert new.alerts == [
        {
            "data": {"title": "title", "description": "text", "level": "LOG_LEVEL_WARNING"},
            "experimentId": 1,
            "trialId": 1,
        }
    ]


def test_master_without_version_tries_the_operation_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in ((NEW, [10]), (MIDDLE, [4, 10])):
        with foreign_master(version) as master:
            master.version = "unknown"
            trial = master.add_trial(lengths=(4, 10))
            lengths = []
            with opened(master, trial, tmp_path / version, monkeypatch) as ctx:
                for op in ctx.searcher.operations():
                    lengths.append(op.length)
                    op.report_completed(0.5)
            assert lengths == expected


def test_operations_without_max_length_of_new_master_are_none(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial(config={"searcher": {"name": "single", "metric": "loss", "unit": "epochs"}})
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        assert ctx.searcher.get_configured_units() is core.Unit.EPOCHS
        with pytest.raises(ValueError, match=r"searcher\.max_length"):
            next(ctx.searcher.operations())


def test_save_without_steps_is_rejected_before_storing(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "f").write_text("f")
    with opened(new, new.add_trial(), tmp_path, monkeypatch) as ctx:
        with pytest.raises(ValueError, match="steps_completed"):
            ctx.checkpoint.upload(tmp_path / "model", {"step": 3})
    assert not (tmp_path / "store").exists() or not any(p.name[0] != "." for p in (tmp_path / "store").iterdir())


def test_next_allocation_starts_from_the_masters_checkpoint(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        for step in (1, 2, 3):
            ctx.train.report_training_metrics(step, {"loss": step})
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "step").write_text(str(step))
    new.end(trial)
    second = list(new.checkpoints)[1]
    with opened(new, trial, tmp_path, monkeypatch, latest=second) as ctx:
        assert ctx.latest_checkpoint == second
        with ctx.checkpoint.restore_path(second) as path:
            assert (path / "step").read_text() == "2"
        ctx.train.report_training_metrics(3, {"loss": 30})
    assert [(r["steps"], r["avg"]["loss"]) for r in trial.rows if not r["hidden"]] == [(1, 1), (2, 2), (3, 30)]


@pytest.mark.parametrize("what", ["x", ".det_core/manifest.json", "all of it"])
def test_start_checkpoint_damaged_or_missing_is_replaced_in_trial(
    what: str, new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each start is handed the same one; four of them ended a trial."""
    trial = new.add_trial()
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        for step in (1, 2, 3):
            ctx.train.report_validation_metrics(step, {"loss": 1 / step})
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "x").write_text(f"of step {step}")
    new.end(trial)
    first, second, third = list(new.checkpoints)
    if what == "all of it":
        shutil.rmtree(tmp_path / "store" / second)
    else:
        path = tmp_path / "store" / second / what
        path.chmod(0o644)
        path.write_bytes(b"?" * path.stat().st_size)
    capfd.readouterr()
    with opened(new, trial, tmp_path, monkeypatch, latest=second) as ctx:
        assert ctx.info is not None
        assert (ctx.latest_checkpoint, ctx.steps_completed) == (first, 1)
        assert (ctx.info.latest_checkpoint, ctx.info.trial.steps_completed) == (first, 1)
        with ctx.checkpoint.resume() as folder:
            assert folder is not None and (folder / "x").read_text() == "of step 1"
    said = capfd.readouterr().err
    assert f", with checkpoint {first} to start from" in said and third not in said
    assert f"checkpoint {first} is taken, and newer ones are passed over: " in said and second in said


def test_start_checkpoint_of_another_trial_missing_is_an_error(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(new, new.add_trial(), tmp_path, monkeypatch, latest="of-another") as ctx:
        assert (ctx.latest_checkpoint, ctx.steps_completed) == ("of-another", 0)
        with pytest.raises(CheckpointNotFound, match="of-another"), ctx.checkpoint.resume():
            raise AssertionError("the block was entered")


def test_trial_is_preempted_by_master_not_by_signal(
    master: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = master.add_trial()
    with opened(master, trial, tmp_path, monkeypatch) as ctx:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not ctx.preempt.should_preempt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "SIGINT would be a preemption"
        master.preempt(trial)
        until(ctx.preempt.should_preempt)
        assert ctx.preempt.should_preempt()
        assert master.acks == [trial.allocation_id]
    assert master.acks == [trial.allocation_id]


def test_close_does_not_wait_for_the_poll(new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(new, new.add_trial(), tmp_path, monkeypatch) as ctx:
        until(
            lambda: sum(asked.path.endswith("preemption") for asked in new.seen) >= 2
        )  # this one it holds for a minute
        ctx.train.report_training_metrics(1, {"loss": 1})
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_invalid_hp_is_sent_last(new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = new.add_trial()
    with pytest.raises(SystemExit) as e:
        with opened(new, trial, tmp_path, monkeypatch) as ctx:
            ctx.train.report_training_metrics(1, {"loss": 1})
            raise InvalidHP("lr is too large")
    assert e.value.code == 0
    assert trial.exits == ["EXITED_REASON_INVALID_HP"]
    assert new.seen[-1].path.endswith("early_exit") and len(trial.rows) == 1


def test_zombie_raises_at_next_request_and_at_close(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with pytest.raises(ReportsNotShipped, match=r"2 report\(s\) did not get to .* and lie in .*invalid run id"):
        with opened(new, trial, tmp_path, monkeypatch) as ctx:
            ctx.train.get_metadata()
            trial.run_id += 1
            ctx.train.report_training_metrics(1, {"loss": 1})
            with pytest.raises(MasterError, match="invalid run id"):
                ctx.train.get_metadata()
    assert trial.rows == []


def test_invalid_token_is_an_error(new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MasterDenied, match="401 invalid credentials: the token is no longer valid"):
        with opened(new, new.add_trial(), tmp_path, monkeypatch, env={"DET_SESSION_TOKEN": "old"}):
            raise AssertionError("not reached")


def test_rejected_report_warns_and_ships_the_rest(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with pytest.raises(ReportsNotShipped, match=r"step 2: .*metric 'epoch' is not a number"):
        with opened(new, trial, tmp_path, monkeypatch) as ctx:
            for step, metrics in enumerate(({"a": 1}, {"epoch": "first"}, {"b": 2}), 1):
                ctx.train.report_training_metrics(step, metrics)
            with pytest.raises(MasterError, match=r"step 2: .*metric 'epoch' is not a number"):
                ctx.train.get_metadata()
            assert ctx.train.get_metadata() == {}, "told once"
    assert [r["steps"] for r in trial.rows] == [1, 3]


def test_master_unreachable_at_close_raises(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    patience = {"DET_CORE_SHIP_TIMEOUT": "0.5", "DET_CORE_RUN_DIR": str(tmp_path / "run")}
    with pytest.raises(
        ReportsNotShipped, match=r"2 report\(s\) did not get .* within 0 s|within 1 s|did not take them"
    ):
        with opened(new, trial, tmp_path, monkeypatch, env=patience) as ctx:
            ctx.train.report_training_metrics(1, {"loss": 1})
            ctx.train.get_metadata()
            new.close()
            ctx.train.report_training_metrics(2, {"loss": 2})
    state = json.loads((tmp_path / "run" / "shipped-0-0.json").read_text())
    first, *_ = Cursor(tmp_path / "run", 0, 0, to=state["to"]).read()
    assert first.record.get("steps_completed") == 2, "run_start and the first row have arrived"


def test_tensorboard_files_of_trial_have_contract_paths(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = core.TensorboardMode.AUTO
    with opened(new, new.add_trial(), tmp_path, monkeypatch, tensorboard_mode=mode) as ctx:
        ctx.train.report_training_metrics(1, {"loss": 1.0})
    found = list((tmp_path / "store" / "the-cluster" / "tensorboard" / "experiment" / "1" / "trial" / "1").iterdir())
    assert len(found) == 1 and "tfevents" in found[0].name


def test_profiler_rows_of_trial_have_no_step_and_arrive_once(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        ctx.profiler.on(0.1, 1)
        until(lambda: sum(r["group"] == "memory" for r in trial.rows) >= 2)
        ctx.profiler.off()
    rows = [r for r in trial.rows if r["group"] == "memory"]
    assert len(rows) >= 2 and all(r["steps"] is None and set(r["avg"]) == {"agent-1"} for r in rows)
    assert len({r["time"] for r in rows}) == len(rows)


def test_task_other_than_trial_is_a_bare_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {
        "master_url": "http://m:8080", "cluster_id": "c", "agent_id": "a", "slot_ids": [0], "task_id": "t",
        "allocation_id": "al", "session_token": "s", "task_type": "NOTEBOOK",
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(info))
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path))
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        assert ctx.info is not None and ctx.info.task_id == "t"
        ctx.train.report_training_metrics(1, {"loss": 1})
    assert (home / "runs" / ctx.run_id / "journal-0-0.jsonl").exists()


def test_report_does_not_wait_for_the_master(
    new: ForeignMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new.add_trial()
    with opened(new, trial, tmp_path, monkeypatch) as ctx:
        with new.lock:  # the master answers nothing
            done = threading.Event()

            def report() -> None:
                for step in range(1, 201):
                    ctx.train.report_training_metrics(step, {"loss": step})
                done.set()

            thread = threading.Thread(target=report)
            thread.start()
            assert done.wait()
        thread.join()
    assert [r["steps"] for r in trial.rows] == list(range(1, 201))
    assert os.environ.get("DET_CORE_INFO_DIR") is None
