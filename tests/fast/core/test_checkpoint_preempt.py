"""A preempted script that saves in the background is waited for while there is time, and says what is saved."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.checkpoints import listed, nothing_is_left_over
from support.ranks import running

TRAIN = """
import os, sys, time
from pathlib import Path
from det_core import core

root, slow = Path(sys.argv[1]), float(sys.argv[2])
with core.DistributedContext.from_torch_distributed() as distributed:
    shard = distributed.size > 1
    with core.init(
        distributed=distributed, checkpoint_storage=root, tensorboard_mode=core.TensorboardMode.MANUAL
    ) as ctx:
        def save(step):
            with ctx.checkpoint.store_path({"steps_completed": step}, shard=shard, blocking=False) as (path, _):
                for i in range(200):
                    (path / f"{distributed.rank}-{i}").write_bytes(b"x" * 2000)
        save(1)
        handle = ctx.checkpoint.begin({"steps_completed": 0}, shard=shard)  # waits for the one before
        handle.abort()
        fsync = os.fsync
        os.fsync = lambda fd: (time.sleep(slow), fsync(fd))
        ctx.preempt.should_preempt()
        print("ready", flush=True)
        while not ctx.preempt.should_preempt():
            time.sleep(0.01)
        save(2)
        print("stopped", flush=True)
"""


def train(tmp_path: Path, size: int, slow: float, grace: str | None) -> tuple[list[int], list[str]]:
    """Statuses and outputs of the ranks, after one SIGTERM to each."""
    environment = {"DET_CORE_GRACE": grace} if grace else {}
    with running(TRAIN, size, tmp_path, env=environment, args=(str(tmp_path / "store"), str(slow))) as ranks:
        ranks.wait_for("ready")
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        statuses = ranks.wait()
        return statuses, [ranks.output(rank) for rank in range(size)]


@pytest.mark.parametrize(("size", "grace"), [(1, None), (3, "3600")])
def test_it_is_waited_for(size: int, grace: str | None, tmp_path: Path) -> None:
    statuses, outputs = train(tmp_path, size, 0.001, grace)
    assert statuses == [0] * size, outputs
    found = listed(tmp_path / "store")
    assert len(found) == 2
    if grace:
        assert "is saved: steps_completed 2" in outputs[0]
    nothing_is_left_over(tmp_path / "store", restart=0)


def test_when_the_grace_is_over_it_says_what_is_saved(tmp_path: Path) -> None:
    size = 3
    statuses, outputs = train(tmp_path, size, 0.5, "4")
    (saved,) = listed(tmp_path / "store")
    assert statuses == [1] * size, outputs
    for output in outputs:
        assert "was not saved" in output
        assert f"the newest that is saved is {saved}, steps_completed 1" in output
    nothing_is_left_over(tmp_path / "store")
