"""``python -m support.dying OPERATION FOLDER``: die at each call to the disk that a checkpoint operation makes.

A fork per call: the parent has no threads, and starts no interpreter anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from support.checkpoints import STEPS, Recorder, alone, fill
from support.disks import FaultyDisk


def operate(name: str, work: Path, disk: FaultyDisk) -> None:
    with alone() as distributed:
        context = Recorder().context(distributed, work / "store", disk=disk)
        blocking = not name.endswith("_in_background")
        if name.startswith("upload"):
            context.upload(work / "source", STEPS, blocking=blocking)
        elif name.startswith("save"):
            context.save({"weights": torch.arange(300_000.0)}, STEPS, blocking=blocking)
        elif name == "delete":
            context.delete((work / "old").read_text())
        elif name == "download":
            context.download((work / "old").read_text(), work / "target")
        else:
            with context.store_path(STEPS, blocking=blocking) as (path, _):
                fill(path)
        context.close()


def in_child(work: Path, name: str, at: int) -> int:
    """Return the exit status of a process that dies at call ``at``; 0 if it finished first."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        operate(name, work, FaultyDisk(str(work / "store"), at, "exit"))
    except BaseException as e:
        print(f"call {at}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main(name: str, folder: Path) -> None:
    for at in range(1, 1000):
        work = folder / f"death-{at}"
        fill(work / "source")
        with alone() as distributed:
            old = Recorder().context(distributed, work / "store").upload(work / "source", STEPS)
        (work / "old").write_text(old)
        status = in_child(work, name, at)
        if status == 0:
            return
        assert status == 77, f"call {at}: exit {status}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
