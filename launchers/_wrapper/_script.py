"""Start a script so that it can be ended, with all it started, whatever happens to the wrapper."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable

from ._linux import signal_at_parents_death

_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


def start(command: list[str], environment: dict[str, str], stdout: int, stderr: int, mask: Iterable[int]) -> int:
    """Run ``command`` in a process group of its own and return its process id, which is the group's id too.

    The caller holds all signals blocked, so that one that is sent to the new process at once finds it without the
    caller's handlers; ``mask`` is what to block in the script. When the calling thread ends the kernel kills the
    script.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            signal_at_parents_death(signal.SIGKILL)
            if os.getppid() == parent:
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                _run(command, environment, mask)
        finally:
            os._exit(127)
    try:
        os.setpgid(pid, pid)  # whoever of the two comes first
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.ESRCH):
            raise
    return pid


def _run(command: list[str], environment: dict[str, str], mask: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)) or signum in _PYTHON_IGNORES:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as e:
        os.write(2, f"cannot run {command[0]}: {e.strerror}\n".encode())
        os._exit(127 if e.errno == errno.ENOENT else 126)
