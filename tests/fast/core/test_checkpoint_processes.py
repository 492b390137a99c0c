"""Checkpoints by ranks that are processes: one dies, machines are two, torch writes the shards."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import support
from det_core import core
from support.checkpoints import STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.processes import free_port
from support.ranks import running

TESTS = str(support.TESTS)

STORE = """
import os, sys, time
from pathlib import Path
from det_core import core
from det_core._errors import DetCoreError
from support.checkpoints import Recorder, fill

with core.DistributedContext.from_torch_distributed() as distributed:
    context = Recorder().context(distributed, Path(sys.argv[1]))
    when = sys.argv[2]
    try:
        with context.store_path({"steps_completed": 1}, shard=True) as (path, storage_id):
            fill(path, {f"of{distributed.rank}/file": b"x" * 1000})
            print("writing", flush=True)
            if when == "in the block" and distributed.rank == 1:
                time.sleep(60)
        if when == "later" and distributed.rank == 1:
            time.sleep(60)
        print("stored", flush=True)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
"""


def test_a_rank_that_is_killed_in_the_block_fails_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(STORE, 3, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store), "in the block")) as ranks:
        ranks.wait_for("writing")
        begin = time.monotonic()
        ranks.processes[1].send_signal(signal.SIGKILL)
        ranks.wait_for("PeerLost", ranks=[0, 2])
        assert time.monotonic() - begin < 10
        assert ranks.wait() == [0, -signal.SIGKILL, 0]
        assert all("rank 1" in ranks.output(rank) and "stored" not in ranks.output(rank) for rank in (0, 2))
    assert listed(store) == []
    nothing_is_left_over(store)


def test_what_a_killed_chief_leaves_is_collected_at_the_next_begin(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(STORE, 2, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store), "in the block")) as ranks:
        ranks.wait_for("writing")
        ranks.processes[0].send_signal(signal.SIGKILL)
        ranks.processes[1].send_signal(signal.SIGKILL)
        ranks.wait()
    assert listed(store) == []
    assert len(list((store / ".det_core-tmp").iterdir())) == 1
    with alone() as distributed:
        storage_id = Recorder().context(distributed, store).upload(fill(tmp_path / "source"), STEPS)
    assert list((store / ".det_core-tmp").iterdir()) == []
    assert listed(store) == [storage_id]


def test_two_machines_download_each_for_themselves(tmp_path: Path) -> None:
    """Two ranks with no rank beside them, linked as machines are: each gets all files."""
    with alone() as distributed:
        storage_id = Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source"), STEPS)
    port, found, errors = free_port(), {}, []

    def run(rank: int) -> None:
        try:
            with core.DistributedContext(
                rank=rank, size=2, local_rank=0, local_size=1, cross_rank=rank, cross_size=2,
                chief_ip="127.0.0.1", pub_port=port, insecure=True,
            ) as distributed:  # fmt: skip
                context = Recorder().context(distributed, tmp_path / "store")
                context.download(storage_id, tmp_path / f"machine{rank}", selector=lambda path: path != "rng")
                with context.restore_path(storage_id), context.store_path(STEPS, shard=True) as (path, written):
                    (path / str(rank)).write_text("x")
                found[rank] = written
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    expected = tree(tmp_path / "store" / storage_id)
    del expected["rng"]
    assert tree(tmp_path / "machine0") == tree(tmp_path / "machine1") == expected
    assert set(tree(tmp_path / "store" / found[0])) == {"0", "1", "metadata.json"}
    assert found[0] == found[1]


TORCH = """
import os
import sys
import threading
from pathlib import Path
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from det_core import core
from support.checkpoints import Recorder

td.init_process_group("gloo")
with core.DistributedContext.from_torch_distributed() as distributed:
    context = Recorder().context(distributed, Path(sys.argv[1]))
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)]), "step": 7}
    with context.store_path({"steps_completed": 7}, shard=True) as (path, storage_id):
        dcp.save(state, checkpoint_id=path)
    found = {"w": distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)]), "step": 0}
    with context.restore_path(storage_id) as path:
        dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["w"].full_tensor(), torch.arange(64.0).reshape(8, 8))
    assert found["step"] == 7
    print("restored", flush=True)
td.destroy_process_group()
assert threading.enumerate() == [threading.main_thread()]
os._exit(0)  # gloo's own threads outlive its group, and one in some hundred interpreters is aborted by them at its end
"""


def test_torch_writes_its_shards_into_a_store_path(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running(TORCH, 2, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(tmp_path / "store"),)) as ranks:
        statuses = ranks.wait()
        assert statuses == [0, 0], ranks.output(0)[-3000:] + ranks.output(1)[-3000:]
        assert "restored" in ranks.output(0)
    (storage_id,) = listed(tmp_path / "store")
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= set(os.listdir(tmp_path / "store" / storage_id))
