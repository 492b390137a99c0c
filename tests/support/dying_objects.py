"""``python -m support.dying_objects OPERATION HOW FOLDER``: die at each call to an object store that is made.

A fork per call: the parent has no threads, and starts no interpreter anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from det_core.storage._objects import ObjectStore
from support.buckets import object_store
from support.checkpoints import FILES, STEPS, Recorder, alone, fill
from support.faulty_doors import FaultyDoor

DEAD = 77


def prepare(work: Path) -> None:
    """A complete checkpoint, and a folder to upload."""
    store = object_store(f"local://{work}/store", work / "scratch")
    with alone() as distributed:
        context = Recorder().context(distributed, work, store=store)
        (work / "old").write_text(context.upload(work / "source", STEPS))


def operate(name: str, how: str, at: int, work: Path) -> None:
    bucket = object_store(f"local://{work}/store", work / "scratch").door.bucket
    store = ObjectStore(FaultyDoor(bucket, at, how), work / "scratch")
    with alone() as distributed:
        context = Recorder().context(distributed, work, store=store)
        if name == "upload":
            context.upload(work / "source", STEPS)
        elif name == "delete":
            context.delete((work / "old").read_text())
        else:
            with context.store_path(STEPS) as (path, _):
                fill(path)


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a process that does ``work``; 0 if it came to the end."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main(name: str, how: str, folder: Path) -> None:
    for at in range(1, 1000):
        work = folder / f"death-{at}"
        fill(work / "source", FILES)
        assert in_child(lambda work=work: prepare(work)) == 0  # type: ignore[misc]
        status = in_child(lambda at=at, work=work: operate(name, how, at, work))  # type: ignore[misc]
        if status == 0:
            return
        assert status == DEAD, f"call {at}: exit {status}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
