"""``python -m support.dying_saves FOLDER TIMES SEED``: kill -9 a trainer that saves, at random moments.

A fork per trainer: the parent has torch, and no threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from det_core.storage import DirectoryStore
from support.checkpoints import Recorder, alone, listed, nothing_is_left_over


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((50_000 + step % 7,), step), "rest": [step] * (step % 5)}


class Telling(Recorder):
    """Observer that writes the committed steps to a pipe."""

    def __init__(self, said: int) -> None:
        super().__init__()
        self.pipe = said

    def on_committed(self, checkpoint: Any) -> None:
        os.write(self.pipe, b"saved %d\n" % checkpoint["steps_completed"])


def train(root: Path, restart: int, begin: int, said: int) -> None:
    """Save until killed, telling each checkpoint that is registered."""
    torch.set_num_threads(1)
    context = Telling(said).context(alone(), root, restart=restart)
    for step in range(begin + 1, 10**9):
        kept = state(step)
        files = {"number": b"%d" % step * 1000} if step % 2 else {}
        context.save(kept, {"steps_completed": step}, files=files, blocking=False)
        kept["weights"].zero_()


def newest(root: Path) -> int:
    """Return the step of the newest checkpoint; check that all are intact."""
    for storage_id in (found := listed(root)):
        steps = DirectoryStore(root).open(storage_id).metadata()["steps_completed"]
        got, expected = torch.load(root / storage_id / "state.pt"), state(steps)
        assert torch.equal(got["weights"], expected["weights"]) and got["rest"] == expected["rest"], steps
        assert steps % 2 == 0 or (root / storage_id / "number").read_bytes() == b"%d" % steps * 1000
    for storage_id in found[:-1]:
        DirectoryStore(root).delete(storage_id)
    return steps if found else 0


def read(pipe: int, until: bytes) -> bytes:
    text = b""
    while until not in text:
        got = os.read(pipe, 1 << 16)
        assert got, text[-1000:]
        text += got
    return text


def main(folder: Path, times: int, seed: int) -> None:
    chance, step = random.Random(seed), 0
    for restart in range(times):
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(ours)
            try:
                train(folder, restart, step, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        text = read(ours, b"saved")
        time.sleep(chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while part := os.read(ours, 1 << 16):
            text += part
        os.close(ours)
        saved = max(int(line.split()[1]) for line in text.splitlines() if line.startswith(b"saved "))
        nothing_is_left_over(folder, restart + 1)
        last = newest(folder)
        assert last >= max(saved, step), f"step {saved} was registered, and {last} is the newest"
        step = last
    print(f"{times} kills; step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
