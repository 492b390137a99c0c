"""Starts of a run beside a process that removes its checkpoints at random, all but one."""

from __future__ import annotations

import subprocess
import sys

from det_core import core
from support.processes import until

REMOVER = """
import random, sys
from det_core.storage import DirectoryStore
store, chance = DirectoryStore(sys.argv[1]), random.Random(5)
print("ready", flush=True)
while True:
    names = sorted(set(store._names()) - {sys.argv[2]})
    if names:
        store.delete(chance.choice(names))
"""


def save(ctx: core.Context, steps: dict[str, int], step: int) -> str:
    """Save a checkpoint and note its steps."""
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, storage_id):
        (path / "x").write_text("x")
    steps[storage_id] = step
    return storage_id


def start_beside_remover(rounds: int) -> None:
    """Start a run again and again, each time after the remover has removed something that the start before saved.

    Raises:
        AssertionError: a start began anew, or what it said is not about the checkpoint that it restored.
    """
    steps: dict[str, int] = {}
    with core.init(name="r") as ctx:
        spared = save(ctx, steps, 1)
        with ctx.checkpoint.restore_path(spared) as path:
            store = path.parent
    command = [sys.executable, "-c", REMOVER, str(store), spared]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as remover:
        try:
            assert remover.stdout is not None and remover.stdout.readline() == "ready\n"
            for number in range(rounds):
                with core.init(name="r", resume="latest") as ctx:
                    with ctx.checkpoint.resume() as path:
                        assert path is not None, f"round {number} began anew"
                    assert ctx.latest_checkpoint == path.name and ctx.steps_completed == steps[path.name]
                    new = [save(ctx, steps, 10 * number + step) for step in (2, 3, 4)]
                until(lambda new=new: not all((store / storage_id).exists() for storage_id in new))
        finally:
            remover.kill()
