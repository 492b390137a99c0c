from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from det_core import client, core
from det_core.journal import RunRecord, read_run
from support.threads import as_ranks

MANUAL = core.TensorboardMode.MANUAL


def _run(home: Path) -> RunRecord:
    (folder,) = (home / "runs").iterdir()
    return read_run(folder)


def test_reports_are_in_the_run(home: Path) -> None:
    with core.init() as ctx:
        ctx.train.report_training_metrics(
            1, {"loss": 0.5, "n": np.float32(2)}, batch_metrics=[{"loss": 0.6}, {"loss": 0.4}]
        )
        ctx.train.report_validation_metrics(1, {"acc": 0.9})
        ctx.train.report_metrics("gradients", 1, {"norm": float("inf")})
        ctx.train.set_status("training")
        ctx.train.report_progress(0.25)
    run = _run(home)
    (row,) = run.rows("training", batches=True)
    assert row.metrics == {"loss": 0.5, "n": 2.0}
    assert row.batch_metrics == [{"loss": 0.6}, {"loss": 0.4}]
    assert run.rows("validation")[0].metrics == {"acc": 0.9}
    assert run.rows("gradients")[0].metrics == {"norm": float("inf")}
    assert run.status == "training"
    assert run.progress == 0.25
    assert run.state == "completed"


@pytest.mark.parametrize(
    ("group", "steps", "metrics", "said"),
    [
        ("training", 1, {"a": {"b": [1, {2}]}}, "b"),
        ("a.b", 1, {"x": 1}, "group"),
        ("", 1, {"x": 1}, "group"),
        ("training", 1.0, {"x": 1}, "steps_completed"),
        ("training", True, {"x": 1}, "steps_completed"),
        ("training", "3", {"x": 1}, "steps_completed"),
        ("training", -1, {"x": 1}, "steps_completed"),
        ("training", 1, {(3, 4): 1}, "(3, 4)"),
        ("training", 1, [1], "metrics"),
        ("validation", 1, {"acc": None}, "acc"),
    ],
)
def test_report_invalid_value_is_rejected(home: Path, group: str, steps: object, metrics: object, said: str) -> None:
    with core.init() as ctx:
        with pytest.raises((TypeError, ValueError)) as e:
            ctx.train.report_metrics(group, steps, metrics)  # type: ignore[arg-type]
        assert said in str(e.value)
    assert all(not _run(home).rows(g) for g in ("training", "validation"))


def test_report_other_value_of_a_key_is_rejected() -> None:
    with core.init() as ctx:
        ctx.train.report_training_metrics(1, {"loss": 0.5})
        ctx.train.report_training_metrics(1, {"loss": 0.5})
        ctx.train.report_training_metrics(1, {"acc": 1.0})
        with pytest.raises(ValueError, match="loss"):
            ctx.train.report_training_metrics(1, {"loss": 0.4})


def test_report_tensor_changed_in_place_keeps_reported_value(home: Path) -> None:
    torch = pytest.importorskip("torch")
    loss = torch.tensor(0.5, requires_grad=True)
    with core.init(tensorboard_mode=MANUAL) as ctx:
        ctx.train.report_training_metrics(1, {"loss": loss, "v": np.array(3)})
        with torch.no_grad():
            loss.mul_(0).add_(7)
        ctx.train.report_training_metrics(2, {"loss": loss.detach()})
    assert [row.metrics["loss"] for row in _run(home).rows("training")] == [0.5, 7.0]


def test_progress_and_status_invalid_arguments_are_rejected() -> None:
    with core.init() as ctx:
        for bad in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="fraction from 0 to 1"):
                ctx.train.report_progress(bad)
        for wrong in ("0.5", True, None):
            with pytest.raises(TypeError, match="progress must be a number"):
                ctx.train.report_progress(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="status must be a string"):
            ctx.train.set_status(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="EarlyExitReason"):
            ctx.train.report_early_exit("because")  # type: ignore[arg-type]


def test_metadata_after_resume_is_the_last_set() -> None:
    with core.init(name="m") as ctx:
        assert ctx.train.get_metadata() == {}
        assert ctx.train.set_metadata({"a": 1}) == {"a": 1}
        assert ctx.train.set_metadata({"b": {"c": [1, None]}}) == {"b": {"c": [1, None]}}
        assert ctx.train.get_metadata() == {"b": {"c": [1, None]}}
        with pytest.raises(ValueError, match="metadata"):
            ctx.train.set_metadata({"a.b": 1})
    with core.init(name="m", resume="latest") as ctx:
        assert ctx.train.get_metadata() == {"b": {"c": [1, None]}}


def test_metadata_of_one_rank_is_read_on_all() -> None:
    def rank(distributed: core.DistributedContext) -> object:
        with core.init(distributed=distributed, tensorboard_mode=MANUAL) as ctx:
            if distributed.rank == 1:
                ctx.train.set_metadata({"by": 1})
            distributed.allgather(None)
            return ctx.train.get_metadata()

    assert as_ranks(2, rank) == [{"by": 1}] * 2


def test_best_validation_of_searcher_metric() -> None:
    with core.init(searcher_metric="acc", smaller_is_better=False) as ctx:
        assert ctx.train.get_experiment_best_validation() is None
        for step, acc in enumerate([0.5, 0.9, float("nan"), 0.7]):
            ctx.train.report_validation_metrics(step, {"acc": acc, "loss": -1})
        assert ctx.train.get_experiment_best_validation() == 0.9


def test_best_validation_of_operations() -> None:
    with core.init(name="b") as ctx:
        next(ctx.searcher.operations()).report_completed(0.5)
        assert ctx.train.get_experiment_best_validation() == 0.5
    with core.init(name="b", resume="latest", max_length=2) as ctx:
        next(ctx.searcher.operations()).report_completed(0.25)
        assert ctx.train.get_experiment_best_validation() == 0.25


def test_auto_mode_copies_event_files_to_storage(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    storage = tmp_path / "storage"
    with core.init(checkpoint_storage=str(storage), tensorboard_mode=core.TensorboardMode.AUTO) as ctx:
        ctx.train.report_training_metrics(1, {"loss": 0.5})
        with pytest.raises(RuntimeError, match="MANUAL"):
            ctx.train.upload_tensorboard_files()
        local = ctx.train.get_tensorboard_path()
    assert list(local.glob("events.*"))
    assert list((storage / "tensorboard" / ctx.run_id).rglob("events.*"))


def test_failed_copy_of_event_files_does_not_fail_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = tmp_path / "storage"
    ctx = core.init(checkpoint_storage=str(storage), tensorboard_mode=core.TensorboardMode.AUTO)
    storage.mkdir()
    (storage / "tensorboard").write_text("a file where the folder should be")
    ctx.train.report_training_metrics(1, {"loss": 0.5})
    with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        (path / "f").write_text("x")
    assert "event files were not copied" in caplog.text
    with ctx.checkpoint.restore_path(storage_id) as path:
        assert (path / "f").read_text() == "x"
    ctx.close()
    assert caplog.text.count("event files were not copied") == 2
    assert client.run(ctx.run_id).state == "completed", "a copy of a view fails no run whose record is whole"


def test_manual_mode_uploads_selected_files(tmp_path: Path) -> None:
    storage = tmp_path / "storage"

    def rank(distributed: core.DistributedContext) -> str:
        with core.init(distributed=distributed, checkpoint_storage=str(storage), tensorboard_mode=MANUAL) as ctx:
            ctx.train.report_training_metrics(1, {"loss": distributed.rank})
            folder = ctx.train.get_tensorboard_path()
            (folder / "mine.events").write_text(str(distributed.rank))
            (folder / "other.txt").write_text("no")
            ctx.train.upload_tensorboard_files(
                lambda path: path.suffix == ".events",
                lambda path, rank: path.with_name(f"{rank}-{path.name}"),
            )
            return ctx.run_id

    run_id = as_ranks(2, rank)[0]
    kept = storage / "tensorboard" / run_id
    assert sorted(str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file()) == [
        "0-mine.events",
        "1-mine.events",
    ]
    assert (kept / "1-mine.events").read_text() == "1"


def test_report_after_close_raises() -> None:
    ctx = core.init()
    ctx.close()
    for call in (
        lambda: ctx.train.report_training_metrics(1, {"a": 1}),
        lambda: ctx.train.set_status("x"),
        lambda: ctx.train.report_progress(0.5),
        lambda: ctx.train.get_metadata(),
        lambda: ctx.alert("x"),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
