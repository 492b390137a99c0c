"""Checkpoints by ranks that are processes: one dies, machines are two."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import support
from det_core import core
from support.checkpoints import STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.processes import free_port
from support.ranks import running

TESTS = str(support.TESTS)

STORE = """
import os, signal, sys
from pathlib import Path
from det_core import core
from det_core.errors import DetCoreError
from support.checkpoints import Recorder, fill

with core.DistributedContext.from_torch_distributed() as distributed:
    context = Recorder().context(distributed, Path(sys.argv[1]))
    try:
        with context.store_path({"steps_completed": 1}, shard=True) as (path, storage_id):
            fill(path, {f"of{distributed.rank}/file": b"x" * 1000})
            print("writing", flush=True)
            if distributed.rank == 1:
                signal.pause()
        print("stored", flush=True)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
"""


def test_a_rank_that_is_killed_in_the_block_fails_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(STORE, 3, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store),)) as ranks:
        ranks.wait_for("writing")
        ranks.processes[1].send_signal(signal.SIGKILL)
        ranks.wait_for("PeerLost", ranks=[0, 2])
        assert ranks.wait() == [0, -signal.SIGKILL, 0]
        assert all("rank 1" in ranks.output(rank) and "stored" not in ranks.output(rank) for rank in (0, 2))
    assert listed(store) == []
    nothing_is_left_over(store)


def test_what_a_killed_chief_leaves_is_collected_at_the_next_begin(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(STORE, 2, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store),)) as ranks:
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
