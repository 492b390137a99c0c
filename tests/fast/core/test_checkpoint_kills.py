"""``kill -9`` at random moments, while four ranks save in the background and older checkpoints go."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

import support
from det_core.storage import DirectoryStore, Header
from support import warm
from support.checkpoints import tree
from support.processes import until
from support.ranks import running

TESTS = str(support.TESTS)
SIZE = 4
KEPT = 2
TRAIN = """
import sys
from pathlib import Path
from det_core import core
from support.checkpoints import fill

def files(rank, step):
    return {f"of{rank}/{i}": b"%d of %d;" % (i, step) * (20_000 if i == 0 else 100) for i in range(10)}

root, source = Path(sys.argv[1]), Path(sys.argv[2])
with core.DistributedContext.from_torch_distributed() as distributed:
    rank = distributed.rank
    with core.init(
        distributed=distributed, checkpoint_storage=root, name="job", resume="latest",
        tensorboard_mode=core.TensorboardMode.MANUAL, retention=core.KeepLatest(int(sys.argv[3])),
    ) as ctx:
        step = 0
        if ctx.latest_checkpoint is not None:
            with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
                step = ctx.checkpoint.get_metadata(ctx.latest_checkpoint)["steps_completed"]
                for name, data in files(rank, step).items():
                    assert (path / name).read_bytes() == data, f"{name} of step {step} came back as something else"
        print("ready", flush=True)
        while True:
            step += 1
            metadata = {"steps_completed": step}
            if step % 3 == 0:
                folder = fill(source / str(rank), files(rank, step))
                ctx.checkpoint.upload(folder, metadata, shard=True, blocking=step % 2 == 0)
            else:
                with ctx.checkpoint.store_path(metadata, shard=True, blocking=False) as (path, _):
                    fill(path, files(rank, step))
            assert ctx.distributed.allgather(step) == [step] * ctx.distributed.size
"""


def expected(step: int) -> dict[str, bytes]:
    """Return the files of all ranks at a step."""
    return {
        f"of{rank}/{i}": b"%d of %d;" % (i, step) * (20_000 if i == 0 else 100)
        for rank in range(SIZE)
        for i in range(10)
    }


def newest_is_whole(root: Path) -> Header | None:
    """Compare the newest checkpoint byte for byte, and check the files of the others."""
    store = DirectoryStore(root)
    found = store.list()
    for header in found:
        checkpoint = store.open(header.storage_id)
        checkpoint.check(checkpoint.manifest.files, digests=header is found[-1])
    if not found:
        return None
    newest = tree(root / found[-1].storage_id)
    newest.pop("metadata.json")
    assert newest == expected(found[-1].steps_completed)
    return found[-1]


def _newer_than(root: Path, before: int) -> bool:
    return any(header.steps_completed > before for header in DirectoryStore(root).list())


def kills(folder: Path, times: int, seed: int) -> None:
    """Start, kill some or all ranks at a random moment, and look; every other time, after something was saved."""
    chance = random.Random(seed)
    root, before, with_rests = folder / "store", -1, 0
    for number in range(times):
        arguments = (str(root), str(folder / "source"), str(KEPT))
        with running(TRAIN, SIZE, folder, env={"PYTHONPATH": TESTS}, args=arguments) as ranks:
            ranks.wait_for("ready")
            if number % 2:  # however slow the machine is
                until(partial(_newer_than, root, before), of=ranks.processes[0])
            time.sleep(chance.uniform(0, 0.5))
            victims = range(SIZE) if chance.random() < 0.5 else [chance.randrange(SIZE)]
            for rank in victims:
                os.kill(ranks.processes[rank].pid, signal.SIGKILL)
            statuses = ranks.wait()
            assert all(status != 0 for status in statuses)
            assert not any("came back as something else" in ranks.output(rank) for rank in range(SIZE))
        newest = newest_is_whole(root)
        if before >= 0:
            assert newest is not None, f"kill {number}: there was a checkpoint of step {before}, and now there is none"
        if newest is not None:
            assert newest.steps_completed >= before, f"kill {number}: the newest is older than it was"
            before = newest.steps_completed
        with_rests += any((root / ".det_core-tmp").iterdir()) if (root / ".det_core-tmp").exists() else 0
    assert before > 0, "nothing was ever saved"
    assert with_rests or times < 50, "no kill ever hit a save"
    assert len(DirectoryStore(root).list()) <= KEPT + 2
    print(f"{times} kills, {with_rests} of which left rests; step {before}")


def test_a_kill_spares_the_newest_checkpoint(tmp_path: Path) -> None:
    kills(tmp_path, 5, seed=1)


def saves(folder: Path, times: int, seed: int) -> None:
    """Kill a trainer that saves states in the background, again and again."""
    pytest.importorskip("torch")
    done = warm.run(["-m", "support.dying_saves", folder / "store", times, seed], cwd=TESTS)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_kill_while_a_state_is_saved(tmp_path: Path) -> None:
    saves(tmp_path, 4, seed=1)
