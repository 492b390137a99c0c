"""Every launcher around its real framework: killed at any moment, and with much output."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from support.frameworks import Framework, framework
from support.launcher import short_form, write

__all__ = ["framework"]
short = short_form("test_frameworks")


def test_nothing_outlives_kill_9_at_any_moment(framework: Framework, tmp_path: Path) -> None:
    write(tmp_path, "stubborn.py", short.STUBBORN)
    for moment in range(25):
        with short.start(framework, tmp_path, 2, "stubborn.py") as job:
            time.sleep(moment * 0.04)
            os.kill(job.pid, signal.SIGKILL)
            job.process.wait()
            job.nothing_left()


def test_much_output_is_complete(framework: Framework, tmp_path: Path) -> None:
    short.prints(framework, tmp_path, processes=4, long=10_000_000, lines=200_000)
