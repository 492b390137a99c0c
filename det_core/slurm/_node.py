"""The program on each node of several: the launcher, asked to stop by a file that all nodes see.

A signal through srun would reach every process of the step, workers of DataLoaders among them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from det_core._standalone.processes import set_parent_death_signal
from det_core._standalone.stop_signals import STOP_SIGNALS

WATCHED = (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD)
"""Signals to block before the first :func:`start`, for :func:`wait_for_signal`."""
POLL_INTERVAL = 0.5


def main(stop_file: str, *command: str) -> int:
    """Run a command, send it the signal whose number appears in the file, and return its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    child = start(command)
    sent = 0
    while child.poll() is None:
        if wait_for_signal(POLL_INTERVAL):
            sent = signal.SIGTERM  # by Slurm, to every process of the step
        with suppress(OSError, ValueError):  # while the file is empty, or its file system away for a moment
            number = int(Path(stop_file).read_bytes())  # by open(), at which NFS asks whether it has changed
            if number != sent:
                sent = number
                child.send_signal(number)  # with the launcher end its ranks
    return shell_status(child.returncode)


def start(
    command: tuple[str, ...], environment: Mapping[str, str] | None = None, output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that is asked to stop when this one dies, with ``output`` as its stdout and stderr."""
    parent = os.getpid()

    def prepare() -> None:
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above could count
            os._exit(127)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the batch file ignores it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    # By env, so that a program that is not there is a line in the log and status 127, as in a shell.
    return subprocess.Popen(
        ("env", "--", *command), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        preexec_fn=prepare,
    )  # fmt: skip


def wait_for_signal(timeout: float) -> str:
    """Wait for a signal, the end of a child too; return the name of one that asks to stop, else nothing."""
    info = signal.sigtimedwait(WATCHED, max(timeout, 0.0))
    if info is None or info.si_signo == signal.SIGCHLD:
        return ""
    return signal.Signals(info.si_signo).name


def shell_status(returncode: int) -> int:
    """Return an exit status as a shell tells it."""
    return returncode if returncode >= 0 else 128 - returncode
