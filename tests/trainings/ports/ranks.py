"""Search for a minimum by random steps on several ranks, each with random numbers of its own, without torch."""

import json
import random

from det_core import core

LENGTH = 24
distributed = core.DistributedContext.detect()
rank = distributed.rank
random.seed(rank)
x = 3.0
with core.init(distributed=distributed, name="ranks", resume="latest") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = json.loads((path / "search.json").read_text())
            x = saved["x"]
            version, numbers, gauss = saved["random"][rank]
            random.setstate((version, tuple(numbers), gauss))
    for step in range(ctx.steps_completed + 1, LENGTH + 1):
        guess = x + random.gauss(0, 0.5)
        x = min(ctx.distributed.allgather(guess), key=abs)
        if rank == 0:
            ctx.train.report_training_metrics(step, {"distance": abs(x)})
        stop = ctx.preempt.should_preempt()
        if stop or step % 5 == 0 or step == LENGTH:
            states = ctx.distributed.gather(random.getstate())
            if rank == 0:
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "search.json").write_text(json.dumps({"x": x, "random": states}))
        if stop:
            break
