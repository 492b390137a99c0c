"""kill -9 in the middle of group commits."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT


def kill_and_look(empty_url: str, kills: int, seed: int) -> None:
    """Kill who writes so often; what was answered is there after each."""
    command = [sys.executable, "-m", "support.dying_store", empty_url, str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
    assert int(done.stdout) > 0
