"""Processes that can be ended with all their descendants, whatever happens to their parent.

Three habits of the kernel carry this. A process that adopts orphans (a subreaper) stays an ancestor of all that was
started below it, whatever session or group they choose. PR_SET_PDEATHSIG kills a child with the *thread* that forked
it. And /proc tells every process's parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_GIVE_UP = 10.0
"""Seconds after which processes that this user may not kill, such as those of sudo, are left."""


class CannotRun(Exception):
    """A command that could not be run.

    Attributes:
        status: Exit status that a shell returns for it, 126 or 127.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def spawn(
    command: list[str],
    environment: dict[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    *,
    mask: Iterable[int] = (),
    prepare: Callable[[], object] | None = None,
) -> int:
    """Run a command as the leader of a new session, and return its process id. The caller has to wait for it.

    The kernel kills it when the calling thread ends. It has a session and not only a group of its own, because a
    background group of a terminal's session is stopped by SIGTTIN as soon as it reads the terminal.

    Args:
        command: the program, found by the PATH of ``environment``, and its arguments.
        environment: all of its variables.
        stdout, stderr: file descriptors; None leaves this process's.
        mask: the signals that stay blocked in it. Between fork and exec it would run handlers of the caller, who
            therefore blocks what it handles, and sets default actions, until this has returned.
        prepare: called in the child before the program starts.

    Raises:
        CannotRun: the program does not exist, or may not be run.
    """
    parent = os.getpid()

    def in_the_child() -> None:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above could count
            os._exit(127)
        if prepare is not None:
            prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(
            command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True, preexec_fn=in_the_child
        )
    except OSError as e:
        status = 126
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            status = 127
        raise CannotRun(status, f"cannot run {command[0]}: {e.strerror}") from e
    process.returncode = 0  # not waited for by this object, which would warn of that when it is collected
    return process.pid


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies, so that it can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def set_title(title: str) -> None:
    """Show this title instead of the command line in ``ps``, and its first word as the name.

    A process that was forked has its parent's, so that ``pkill -f`` would find both. The kernel reads the command line
    from where the program's arguments lie in memory, so a title cannot be longer (proc(5): cmdline, arg_start).
    """
    fields = _stat(os.getpid())
    start = int(fields[45]) if fields else 0
    if not start:  # not shown by every container's kernel
        return
    with open("/proc/self/cmdline", "rb") as file:
        size = len(file.read())
    ctypes.memmove(start, title.encode()[: size - 1].ljust(size, b"\0"), size)
    with open("/proc/self/comm", "w") as file:
        file.write(title.partition(" ")[0])


def send(pid: int, signum: int) -> bool:
    """Send a signal; return whether the process exists and is this user's."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap() -> dict[int, int] | None:
    """Return the wait statuses of children that have ended, by process ID, or None without any child."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if not pid:
            return ended
        ended[pid] = status


def end_descendants(linger: float = 0.0) -> None:
    """Kill every process below this one until none is left. This process has to adopt orphans.

    Args:
        linger: seconds in which they may end by themselves, as some remove what a script has shared.
    """
    began = time.monotonic()
    pause = 0.001
    while reap() is not None:
        waited = time.monotonic() - began - linger
        # Again and again: while the list is read, one of them may start another.
        if waited >= 0 and not any([send(pid, signal.SIGKILL) for pid in descendants()]) and waited > _GIVE_UP:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def descendants(roots: Iterable[int] | None = None) -> set[int]:
    """Return the IDs of all descendants of processes; by default, of this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    pending = [os.getpid()]
    if roots is not None:
        pending = list(roots)
    while pending:
        below = [pid for pid in children.get(pending.pop(), ()) if pid not in found]
        found.update(below)
        pending += below
    return found


def start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, or None if it has ended, reaped or not.

    With the process ID it identifies the process for good.
    """
    fields = _stat(pid)
    if not fields or fields[0] in "ZX":
        return None
    return int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat behind the name: state, parent, group, …"""
    # Split at the last parenthesis: the name itself may contain spaces and parentheses.
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b") ")[2].decode().split()
    except OSError:  # it has just ended
        return None
