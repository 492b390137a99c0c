"""A script with the contract's own client, of either generation."""

from __future__ import annotations

import os
import sys
import time

import determined as det


def main(ctx: det.core.Context, info: det.ClusterInfo) -> None:
    """Train as the operations say."""
    hparams, step = info.trial.hparams, 0
    if info.latest_checkpoint is not None:
        assert ctx.checkpoint.get_metadata(info.latest_checkpoint)["by"] == info.trial.trial_id
        with ctx.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = int((path / "steps").read_text())
    run = int(os.environ["DET_TRIAL_RUN_ID"])
    print(f"INFO: [1] recipe: run {run} begins at {step}", flush=True)
    if step == 0:
        tell(ctx)
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            ctx.train.report_training_metrics(steps_completed=step, metrics={"loss": hparams["lr"] + 1 / (1 + step)})
            op.report_progress(step)
            if step % 2 == 0:
                report = {"loss": hparams["lr"] + 1 / (1 + step), "batches": step, "odd": float("nan")}
                ctx.train.report_validation_metrics(steps_completed=step, metrics=report)
                save(ctx, step)
            if run == 1 and step == hparams.get("fail_at"):
                print("ERROR: [1] recipe: it fails", file=sys.stderr, flush=True)
                raise SystemExit(3)
            if step == hparams.get("wait_at"):
                while not ctx.preempt.should_preempt():
                    time.sleep(0.05)
            if ctx.preempt.should_preempt():
                save(ctx, step)
                return
            time.sleep(hparams.get("pace", 0))
        op.report_completed(hparams["lr"] + 1 / (1 + step))


def save(ctx: det.core.Context, step: int) -> str:
    """Save a checkpoint; returns its id."""
    by = det.get_cluster_info().trial.trial_id
    with ctx.checkpoint.store_path({"steps_completed": step, "by": by}) as (path, name):
        (path / "steps").write_text(str(step))
    return str(name)


def tell(ctx: det.core.Context) -> None:
    """Make the remaining calls of a script."""
    ctx.train.set_status("training")
    ctx.train.set_metadata({"who": {"name": "stock"}})
    assert ctx.train.get_metadata() == {"who": {"name": "stock"}}
    best = ctx.train.get_experiment_best_validation()
    assert best is None or best > 0
    ctx.alert(title="hello", description="from a trial", level="info")
    ctx.checkpoint.delete(save(ctx, 0))
    ctx.profiler.on(sampling_interval=0.1, samples_per_report=1)
    time.sleep(0.5)
    ctx.profiler.off()


if __name__ == "__main__":
    found = det.get_cluster_info()
    assert found is not None and det.__version__ == sys.argv[1]
    with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as context:
        if found.trial.hparams.get("invalid"):
            raise det.InvalidHP("of no use")
        main(context, found)
