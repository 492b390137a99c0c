"""A trial that validates at each step; at the step ``hold`` it waits for a pause, if its home has a file ``hold``."""

import json
import os
import time
from pathlib import Path

from det_core import core

hold = Path(os.environ["DET_CORE_HOME"], "hold")
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    step = 0
    with ctx.checkpoint.resume() as folder:
        if folder is not None:
            step = json.loads((folder / "step.json").read_text())
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            loss = 2000 - step * ctx.hparams["lr"]
            ctx.train.report_validation_metrics(step, {"loss": loss, "batches": step})
            if step == ctx.hparams["hold"] and hold.exists():
                ctx.train.set_status("holds")
                while not ctx.preempt.requested:
                    time.sleep(0.01)
            stop = ctx.preempt.should_preempt()
            if stop or step == op.length:
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "step.json").write_text(str(step))
            if stop:
                raise SystemExit(0)
        op.report_completed(loss)
