"""``python -m support.dying_saves FOLDER TIMES SEED``: kill -9 a trainer that saves, or its helper, at random moments.

A fork per trainer: the parent has torch, and no threads.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from det_core.errors import CheckpointError
from det_core.storage import DirectoryStore
from support.checkpoints import Recorder, alone, listed, nothing_is_left_over


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((50_000 + step % 7,), step), "rest": [step] * (step % 5)}


def train(root: Path, restart: int, begin: int, said: int) -> None:
    """Save until killed, telling each checkpoint that is registered and the helper's process."""
    torch.set_num_threads(1)
    context = Recorder().context(alone(), root, restart=restart)
    context._writer._registered = lambda record: os.write(said, b"saved %d\n" % record["steps_completed"])
    for step in range(begin + 1, 10**9):
        kept = state(step)
        try:
            files = {"number": b"%d" % step * 1000} if step % 2 else {}
            context.save(kept, {"steps_completed": step}, files=files, blocking=False)
        except CheckpointError as e:
            assert "killed by signal 9" in str(e), e
            os.write(said, b"told\n")
        kept["weights"].zero_()
        if context._writer._states._saver.pid:
            os.write(said, b"helper %d\n" % context._writer._states._saver.pid)


def newest(root: Path) -> int:
    """The step of the newest checkpoint, all being whole."""
    for storage_id in (found := listed(root)):
        steps = DirectoryStore(root).open(storage_id).metadata()["steps_completed"]
        got, expected = torch.load(root / storage_id / "state.pt"), state(steps)
        assert torch.equal(got["weights"], expected["weights"]) and got["rest"] == expected["rest"], steps
        assert steps % 2 == 0 or (root / storage_id / "number").read_bytes() == b"%d" % steps * 1000
    for storage_id in found[:-1]:
        DirectoryStore(root).delete(storage_id)
    return steps if found else 0


def ended(trainer: int) -> None:
    """Wait until what saved for a trainer that was killed has ended too."""
    while any(line[-1:] == [b"%d" % trainer] for line in map(command, Path("/proc").glob("[0-9]*/cmdline"))):
        time.sleep(0.005)


def command(path: Path) -> list[bytes]:
    try:
        return [word for word in path.read_bytes().split(b"\0") if word]
    except OSError:  # it ended meanwhile
        return []


def read(pipe: int, until: bytes, text: bytes = b"") -> bytes:
    while until not in text:
        got = os.read(pipe, 1 << 16)
        assert got, text[-1000:]
        text += got
    return text


def replaced(pipe: int, killed: int) -> tuple[bytes, bool]:
    """Wait for a helper in a killed one's place; all that was said, and that its trainer was told of its death.

    It is not when the helper had nothing to do: then nothing was lost.
    """
    text = b""
    while all(int(pid) == killed for pid in re.findall(rb"helper (\d+)\n", text)):
        got = os.read(pipe, 1 << 16)
        assert got, text[-1000:]
        text += got
    return text, b"told" in text


def main(folder: Path, times: int, seed: int) -> None:
    chance, told, step = random.Random(seed), 0, 0
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
        if restart % 2:
            while not (found := re.findall(rb"helper (\d+)\n", text)):
                text += os.read(ours, 1 << 16)
            os.kill(killed := int(found[-1]), signal.SIGKILL)
            more, was_told = replaced(ours, killed)
            text, told = text + more, told + was_told
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while part := os.read(ours, 1 << 16):  # to the end: the helper does not have it
            text += part
        os.close(ours)
        ended(pid)
        saved = max(int(line.split()[1]) for line in text.splitlines() if line.startswith(b"saved "))
        nothing_is_left_over(folder, restart + 1)
        last = newest(folder)
        assert last >= max(saved, step), f"step {saved} was registered, and {last} is the newest"
        step = last
    assert told or times < 50, "no death of a helper was told"
    print(f"{times} kills, {told} of them of helpers; step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
