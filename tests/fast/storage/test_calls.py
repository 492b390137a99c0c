"""Calls of libraries end at their deadline, and what a library holds up holds up nobody else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from det_core import _clock
from det_core.storage import _calls
from det_core.storage._calls import Calls, OutOfTime, library_loop
from support.processes import until

HUNG = """
import concurrent.futures, sys, threading
from det_core import core
from det_core.storage._calls import Calls

with core.init(name="hung", tensorboard_mode=core.TensorboardMode.MANUAL):
    try:  # a library whose call never returns, and which has a thread of an executor that Python joins
        Calls().run(threading.Event().wait, None, 0.1)
    except TimeoutError as e:
        print(e)
    concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)
    if sys.argv[1] == "raise":
        raise ValueError("the script's own")
    sys.exit(int(sys.argv[1]))
"""


def test_call_that_never_returns_ends_at_its_timeout() -> None:
    release = threading.Event()
    calls = Calls()
    with pytest.raises(TimeoutError, match="timed out after 0 s"):
        calls.run(release.wait, None, 0.05)
    assert calls.is_silent
    release.set()
    assert calls.run(lambda: 3, None, 600.0) == 3
    assert not calls.is_silent


def test_coroutine_that_never_returns_is_cancelled() -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        Calls().run(wait, library_loop(), 0.05)
    assert cancelled.wait()


def test_loop_that_a_call_blocks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_loop", None)  # the others keep theirs
    release = threading.Event()

    async def block() -> None:
        release.wait()

    async def answer() -> int:
        return 3

    loop = library_loop()
    try:
        with pytest.raises(TimeoutError):
            Calls().run(block, loop, 0.05)
        another = library_loop()
        assert another is not loop
        assert Calls().run(answer, another, 600.0) == 3
    finally:
        release.set()
    for used in (loop, another):
        used.call_soon_threadsafe(used.stop)
        until(lambda used=used: not used.is_running())  # type: ignore[misc]
        used.close()


def test_deadline_of_the_process_ends_a_call_and_starts_no_other() -> None:
    release = threading.Event()
    calls = Calls()
    ends: list[float] = []
    calls.deadline = lambda: ends[0] if ends else None
    timer = threading.Timer(0.05, lambda: ends.append(_clock.monotonic()))
    timer.start()
    with pytest.raises(OutOfTime, match="grace period is over"):
        calls.run(release.wait, None, 600.0)
    timer.join()
    release.set()
    with pytest.raises(OutOfTime):
        calls.run(lambda: pytest.fail("it was called"), None, 600.0)
    assert calls.run(lambda: 3, None, 600.0, past_deadline=True) == 3


def test_time_that_a_call_may_take_counts_from_its_last_progress() -> None:
    release = threading.Event()
    moved = [_clock.monotonic()]

    def since() -> float:
        if len(moved) < 5:
            moved.append(_clock.monotonic())
        return moved[-1]

    with pytest.raises(TimeoutError):
        Calls().run(release.wait, None, 0.05, since)
    assert len(moved) == 5
    release.set()


@pytest.mark.parametrize(("argument", "status"), [("0", 0), ("3", 3), ("raise", 1)])
def test_process_with_a_thread_that_python_would_join_ends_with_its_status(
    argument: str, status: int, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", HUNG, argument], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stdout == "timed out after 0 s\n"
    state = "completed" if argument == "0" else "failed"
    assert f" {state}" in done.stderr.splitlines()[1]
