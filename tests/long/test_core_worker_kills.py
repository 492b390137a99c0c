"""``kill -9`` and signals at random moments of trainings whose DataLoader has workers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from support.worker_stops import METHODS, SIGNALS, Training

pytest.importorskip("torch")
KILLS = int(os.environ.get("KILLS", "200"))
PER_TRAINING = 10
STEPS = {"STEPS": "400"}
MAX_DELAY = 1.0
"""Seconds after READY, or after the start, within which a training is disturbed."""


def test_weights_after_many_kills_and_signals_are_bit_equal(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = disturbed(tmp_path / "undisturbed", rng, 0)
    for first in range(0, KILLS, PER_TRAINING):
        folder = tmp_path / str(first)
        assert disturbed(folder, rng, min(PER_TRAINING, KILLS - first)) == expected
        staged = [path for path in folder.rglob("*") if "staging" in path.name.lower() and path.is_dir()]
        assert not [path for path in staged if any(path.iterdir())], staged
        shutil.rmtree(folder)


def disturbed(folder: Path, rng: random.Random, times: int) -> str:
    """Train to the end, killed or signalled so often on the way; return the weight."""
    folder.mkdir()
    for n in range(times + 1):
        training = Training("bare", rng.choice(METHODS), folder, cold=True, **STEPS)
        try:
            if n < times:
                if rng.random() < 0.7:
                    training.wait_for_start(n)
                time.sleep(rng.random() * MAX_DELAY)
                if rng.random() < 0.5:
                    training.process.send_signal(signal.SIGKILL)  # nothing, where it has ended
                else:
                    training.send(rng.choice(SIGNALS), to_each=rng.random() < 0.5)
            stopped = training.end()
        finally:
            training.kill()
        assert stopped.status is not None, f"hangs: {stopped.output[-2000:]}"
        assert not stopped.left, f"left after {stopped.status}: {stopped.left}"
        if stopped.status == 0 and (weights := re.findall("END (.*)", stopped.output)):
            return str(weights[-1])
    raise AssertionError(stopped.output[-2000:])
