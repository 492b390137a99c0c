"""The loop of docs/core-api.md, killed: it ends with the weights and the rows of one that was never disturbed."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from support import pages
from support.killed import Restarted, digest, disturb

EXACT = pages.block("docs/core-api.md", "exact.py")


def kills(tmp_path: Path, ranks: int, times: int, seed: int) -> None:
    """Kill it so often, at random, and compare."""
    print(f"seed {seed}")
    straight = Restarted(tmp_path / "straight", EXACT, ranks)
    straight.finish()
    other = disturb(
        lambda name: Restarted(tmp_path / name, EXACT, ranks), random.Random(seed), [signal.SIGKILL] * times,
        most=min(250, 1000 // times),  # so that the 600 steps last for as many kills
    )  # fmt: skip
    assert [step for step, *_ in straight.rows()] == list(range(1, 601))
    assert other.rows() == straight.rows()
    ends = [script.state() for script in (straight, other)]
    for end in ends:
        end["per_rank"] = [own["random"]["torch"] for own in end["per_rank"]]  # the script seeds no other generator
    assert digest(ends[0]) == digest(ends[1])


@pytest.mark.parametrize("ranks", [1, 3])  # gloo adds alike in any order on two
def test_the_loop_resumes_exactly_after_a_kill(tmp_path: Path, ranks: int) -> None:
    kills(tmp_path, ranks, 1, seed=ranks)


@pytest.mark.parametrize("gone", [False, True])
def test_the_loop_trains_again_what_a_damaged_or_missing_checkpoint_held(tmp_path: Path, gone: bool) -> None:
    script = Restarted(tmp_path / "script", EXACT, 1)
    script.finish()
    rows, end = script.rows(), digest(script.state())
    newest = max(script.home.glob("runs/*/checkpoints/*/state.pt"), key=lambda path: path.stat().st_mtime_ns)
    if gone:
        shutil.rmtree(newest.parent)
    else:
        newest.chmod(0o644)
        newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    script.finish()
    assert "newer ones are passed over: " in script.output
    shutil.rmtree(newest.parent, ignore_errors=True)  # which is of the same step as the newest now
    assert (script.rows(), digest(script.state())) == (rows, end)
