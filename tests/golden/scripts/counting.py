"""Count to 16 and save every fourth step: complete checkpoints on one rank, sharded ones on several.

Its variables: NAME, the run's; STORAGE, a ``checkpoint_storage`` as JSON; END, such as ``KILL 6``: the signal that its
last rank sends itself, and at which step.
"""

import json
import math
import os
import signal

from det_core import core

how, at = os.environ.get("END", "KILL 0").split()
distributed = core.DistributedContext.detect()
rank, size = distributed.rank, distributed.size
with core.init(
    name=os.environ["NAME"],
    resume="latest",
    distributed=distributed,
    checkpoint_storage=json.loads(os.environ.get("STORAGE", "null")),
    max_length=16,
    tensorboard_mode=core.TensorboardMode.MANUAL,
) as ctx:
    seen: list[int] = []
    with ctx.checkpoint.resume() as folder:
        if folder is not None:
            seen = json.loads((folder / f"rank{rank}" / "seen.json").read_text())
    if rank == 0:
        ctx.train.set_status("counting")
        ctx.train.set_metadata({"words": ["gold", None], "number": 0.1})
    for op in ctx.searcher.operations():
        for step in range(ctx.steps_completed + 1, op.length + 1):
            seen.append(step)
            if rank == 0:
                ctx.train.report_training_metrics(step, {"loss": 1 / step, "deep": {"inf": math.inf}}, [{"x": step}])
                op.report_progress(step)
            else:
                ctx.train.report_metrics(f"rank{rank}", step, {"square": step * step})
            if rank == 0 and step % 4 == 0:
                ctx.train.report_validation_metrics(step, {"loss": 2 / step, "word": "ü"})
            if step == int(at) and rank == size - 1:
                os.kill(os.getpid(), signal.Signals[f"SIG{how}"])
            ctx.distributed.barrier()
            stop = ctx.preempt.should_preempt()
            if stop or step % 4 == 0:
                with ctx.checkpoint.store_path({"steps_completed": step, "by": "counting"}, shard=size > 1) as (
                    path,
                    _,
                ):
                    (path / f"rank{rank}").mkdir()
                    (path / f"rank{rank}" / "seen.json").write_text(json.dumps(seen))
            if stop:
                raise SystemExit(0)
        if rank == 0:
            op.report_completed(1 / op.length)
