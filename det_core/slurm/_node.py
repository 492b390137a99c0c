"""The program on each node of several: the launcher, asked to stop by a file that all nodes see.

A signal through srun would reach every process of the step, workers of DataLoaders among them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from det_core._standalone.processes import signal_at_parents_death
from det_core._standalone.stop_signals import STOP_SIGNALS

STOP = "stop"
KILL = "kill"
SIGNAL = "SIGTERM"
"""Words in the file: two of the job's program, one of a node's that Slurm has signalled."""
POLL_INTERVAL = 0.5
WATCHED = (*STOP_SIGNALS, signal.SIGUSR2)


def main(arguments: list[str]) -> int:
    """Run ``FILE -- COMMAND`` and return its exit status, as a shell tells it."""
    file = Path(arguments[0])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*WATCHED, signal.SIGCHLD})
    child = start(arguments[2:], mask)
    is_told = False
    while child.poll() is None:
        if wait_for_signal(POLL_INTERVAL):  # Slurm has sent it to every process of the step
            is_told = True
            add_word(file, SIGNAL)
        words = read_words(file)
        if KILL in words:
            child.kill()  # and with the launcher end its ranks
        elif STOP in words and not is_told:
            is_told = True
            child.send_signal(signal.SIGTERM)
    return shell_status(child.returncode)


def start(
    command: list[str],
    mask: Iterable[int],
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that is asked to stop when this one dies.

    Args:
        command: program and arguments.
        mask: signals to block in it.
        environment: its variables; None: this process's.
        stdout, stderr: as Popen takes them.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal_at_parents_death(signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above could count
            os._exit(127)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the batch file ignores it
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, preexec_fn=prepare
    )


def wait_for_signal(timeout: float) -> str:
    """Wait for one of the blocked signals, SIGCHLD too; return the name of one that asks to stop, else nothing."""
    info = signal.sigtimedwait({*WATCHED, signal.SIGCHLD}, max(timeout, 0.0))
    return "" if info is None or info.si_signo == signal.SIGCHLD else signal.Signals(info.si_signo).name


def add_word(file: Path, word: str) -> None:
    """Add a word to the file; in one write, as several nodes do."""
    with open(file, "ab", buffering=0) as f:
        f.write(f"{word}\n".encode())


def read_words(file: Path) -> list[str]:
    """Return the words in the file; it is opened each time, at which NFS asks its server whether it has changed."""
    with suppress(OSError):
        return file.read_text().split()
    return []


def shell_status(returncode: int) -> int:
    """Return an exit status as a shell tells it."""
    return returncode if returncode >= 0 else 128 - returncode
