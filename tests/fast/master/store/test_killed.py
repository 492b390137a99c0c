"""kill -9 in the middle of group commits: everything that was answered is there, and nothing is half there."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from support import ROOT


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_what_was_answered_survives_kill_9(empty_url: str, kills: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    command = [sys.executable, "-m", "support.dying_store", empty_url, str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
    assert int(done.stdout) > 0
