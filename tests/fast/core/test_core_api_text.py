"""Every code block of the reference text of the Core API, run as it stands with only the import changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import det_core as det


def my_save_model(model: str, path: Path) -> None:
    (path / "weights.txt").write_text(model)


def my_load_model(path: Path) -> str:
    return (path / "weights.txt").read_text()


def test_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt_dir = tmp_path / "ckpt"
    ckpt_dir.mkdir()
    my_save_model("w", ckpt_dir)
    with det.core.init() as core_context:
        # The text's example leaves metadata out; with steps_completed it is what the reference accepts.
        if core_context.distributed.rank == 0:
            storage_id = core_context.checkpoint.upload(ckpt_dir, {"steps_completed": 1}, shard=False)
            print(f"done uploading checkpoint {storage_id}")
    assert f"done uploading checkpoint {storage_id}" in capsys.readouterr().out


def test_store_and_restore_path(capsys: pytest.CaptureFixture[str]) -> None:
    my_model = "the weights"
    with det.core.init() as core_context:
        if core_context.distributed.rank == 0:
            with core_context.checkpoint.store_path({"steps_completed": 1}, shard=False) as (
                path,
                storage_id,
            ):
                my_save_model(my_model, path)
                print(f"done saving checkpoint {storage_id}")
            print(f"done uploading checkpoint {storage_id}")

        my_checkpoint_uuid = storage_id
        with core_context.checkpoint.restore_path(my_checkpoint_uuid) as path:
            my_model = my_load_model(path)
    assert my_model == "the weights"
    assert "done uploading" in capsys.readouterr().out


def test_searcher_operations() -> None:
    trained: list[int] = []

    def my_train_batch() -> None:
        trained.append(1)

    def my_validate() -> dict[str, float]:
        return {"my_searcher_metric": 0.5}

    with det.core.init(max_length=3) as core_context:
        # Assuming you configured the searcher in terms of batches,
        # the op.length is also interpeted as a batch count.
        # Note that you'll have to load your starting point from a
        # checkpoint if you want to support pausing/continuing training.
        batches_trained = 0

        for op in core_context.searcher.operations():
            # Train for however long the op requires you to.
            # Note that op.length is an absolute length, not an
            # incremental length:
            while batches_trained < op.length:
                my_train_batch()

                batches_trained += 1

                # Reporting progress every batch would be expensive:
                if batches_trained % 1000:
                    op.report_progress(batches_trained)

            # After training the required amount, pass your searcher
            # metric to op.report_completed():
            val_metrics = my_validate()
            op.report_completed(val_metrics["my_searcher_metric"])
    assert sum(trained) == 3


def test_profiler() -> None:
    with det.core.init() as core_context:
        core_context.profiler.on()
        ...
        core_context.profiler.off()


@pytest.mark.parametrize(
    ("configured", "units"),
    [({"epochs": 50}, det.core.Unit.EPOCHS), (50, None), ({"batches": 5}, det.core.Unit.BATCHES)],
)
def test_configured_units(configured: object, units: object) -> None:
    with det.core.init(max_length=configured) as core_context:  # type: ignore[arg-type]
        assert core_context.searcher.get_configured_units() == units


NAMES = {
    "Context": "",
    "DistributedContext": "from_horovod from_deepspeed from_torch_distributed get_rank get_local_rank get_size"
    " get_num_agents gather gather_local allgather allgather_local broadcast broadcast_local",
    "CheckpointContext": "upload download get_metadata store_path restore_path delete",
    "PreemptContext": "should_preempt acknowledge_preemption_signal",
    "TrainContext": "set_status set_metadata get_metadata report_training_metrics report_validation_metrics"
    " report_metrics get_tensorboard_path upload_tensorboard_files report_early_exit get_experiment_best_validation",
    "SearcherContext": "operations acknowledge_out_of_ops get_configured_units",
    "SearcherOperation": "length report_progress report_completed",
    "ProfilerContext": "on off",
    "PreemptMode": "WorkersAskChief ChiefOnly WorkersAskMaster",
    "SearcherMode": "WorkersAskChief ChiefOnly",
    "TensorboardMode": "AUTO MANUAL",
    "DownloadMode": "LocalWorkersShareDownload NoSharedDownload",
    "EarlyExitReason": "INVALID_HP USER_REQUESTED_STOP",
    "Unit": "EPOCHS RECORDS BATCHES",
}


def test_every_name_of_the_text_is_there() -> None:
    named = [(owner, name) for owner, names in NAMES.items() for name in names.split()]
    assert [(owner, name) for owner, name in named if not hasattr(getattr(det.core, owner), name)] == []
    with det.core.init() as ctx:
        for part in ["checkpoint", "distributed", "preempt", "train", "searcher", "profiler", "info", "alert"]:
            assert hasattr(ctx, part)
