"""Scripts with a det_core context under the launcher: a lost rank, a preemption, an early exit."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

from support.launcher import TORCH, launched, write
from support.processes import seconds_in_the_queue

COLLECTIVES = """
    import os, time
    from det_core import core
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        if distributed.rank == 2:
            for _ in range(2):  # as a DataLoader does
                if os.fork() == 0:
                    time.sleep(600)
        preempted = ctx.preempt.should_preempt()
        try:
            for i in range(10**9):
                distributed.allgather(i)
                if i == 20:
                    print("ready", os.getpid())
                preempted = preempted or ctx.preempt.should_preempt()
        except Exception as e:
            print(f"raised {time.time()} {os.getpid()} {type(e).__name__}: {e}")
            time.sleep(0.5)  # as one that cleans up
            print("preempted", preempted)
            raise
"""
PREEMPTED = """
    import time
    from det_core import core
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        calls = 1
        assert not ctx.preempt.should_preempt()
        distributed.allgather(None)
        print("ready")
        while not ctx.preempt.should_preempt():
            calls += 1
            time.sleep(0.001 * (1 + distributed.rank))
        print("stopped after", calls)
"""
INVALID = """
    import time
    from det_core import core, InvalidHP
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        distributed.allgather(None)
        if distributed.rank == 2:
            raise InvalidHP("a learning rate below 0")
        while True:
            time.sleep(0.01)
            ctx.preempt.should_preempt()
"""


def test_killed_rank_is_named_by_the_others_within_2_s(tmp_path: Path) -> None:
    write(tmp_path, "collectives.py", COLLECTIVES)
    with launched(TORCH, "--nproc-per-node", "4", "collectives.py", folder=tmp_path) as job:
        pids = {rank: int(pid) for rank, pid in job.wait_for(r"\[rank=(\d)\] ready (\d+)", times=4)}
        victim = pids.pop("2")
        queued = {pid: seconds_in_the_queue(pid) for pid in pids.values()}
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        raised = job.wait_for(r"raised ([\d.]+) (\d+) PeerLost: .*rank 2", times=3)  # each of them sleeps now
        for moment, pid in raised:
            waited = seconds_in_the_queue(int(pid)) - queued[int(pid)]
            assert float(moment) - killed - waited < 2
        assert job.wait() == 128 + signal.SIGKILL
        job.nothing_left()
    assert job.out.count("preempted False") == 3, "the SIGTERM of torchrun's agent was taken for a preemption"
    assert f"[launcher] rank 2 (pid {victim}" in job.err and "failed first, killed by SIGKILL" in job.err


def test_sigterm_at_any_moment_stops_all_ranks_at_the_same_call(tmp_path: Path) -> None:
    stop_at_any_moment(tmp_path, random.Random(5), times=2)


def stop_at_any_moment(folder: Path, moments: random.Random, times: int) -> None:
    write(folder, "preempted.py", PREEMPTED)
    for _ in range(times):
        with launched(TORCH, "--nproc-per-node", "3", "preempted.py", folder=folder) as job:
            job.wait_for("ready", times=3)
            time.sleep(moments.uniform(0, 0.5))
            os.kill(job.pid, signal.SIGTERM)
            assert job.wait() == 0, job.err
        assert len(set(re.findall(r"stopped after (\d+)", job.out))) == 1, job.out
        assert job.out.count("stopped after") == 3


def test_invalid_hyperparameters_of_one_rank_end_all_with_status_0(tmp_path: Path) -> None:
    write(tmp_path, "invalid.py", INVALID)
    with launched(TORCH, "--nproc-per-node", "4", "invalid.py", folder=tmp_path) as job:
        assert job.wait() == 0, job.err
    assert "failed" not in job.err
