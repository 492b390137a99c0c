"""A rank that waits in gloo for one that does not answer: its timeout ends the wait, and no other thread does.

When torch changes that, docs/limits.md has to, and such a wait can end as soon as a rank is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launcher import TORCH, launched, write

SCRIPT = """
    import datetime, os, sys, threading, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
    dist.barrier()
    if dist.get_rank() == 1:
        while not os.path.exists("over"):
            time.sleep(0.02)
        os._exit(0)
    group = dist.group.WORLD
    call = {"abort": group.abort, "shutdown": group.shutdown, "destroy": dist.destroy_process_group}[sys.argv[1]]
    threading.Timer(1, lambda: print("called", call(), flush=True)).start()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as e:
        print("ended:", e, flush=True)
    open("over", "w").close()
    os._exit(0)
"""


@pytest.mark.parametrize("call", ["abort", "shutdown", "destroy"])
def test_wait_in_gloo_is_ended_by_its_timeout_alone(tmp_path: Path, call: str) -> None:
    with launched([*TORCH, "--nproc-per-node", "2"], write(tmp_path, "waits.py", SCRIPT), call, folder=tmp_path) as job:
        assert job.wait() == 0, job.err
    called, ended = job.out.splitlines()
    assert called == "[rank=0] called None" and "Timed out waiting 15000ms" in ended, job.out
