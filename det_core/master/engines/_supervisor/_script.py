"""Starting the script."""

from __future__ import annotations

import errno
import os
import signal

from ._appear import appear
from ._linux import set_parent_death_signal

_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CannotRun(Exception):
    """The command could not be run; ``status`` is what a shell would say."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def words(path: str) -> list[str]:
    """The content of a file whose words are separated by NUL."""
    with open(path, "rb", buffering=0) as f:
        data = f.read()
    return [os.fsdecode(word) for word in data.split(b"\0")] if data else []


def start(folder: str, command: list[str], output: tuple[int, int], *, visible: bool) -> int:
    """Run a command in a session of its own.

    Args:
        folder: the allocation's folder.
        command: what to run; found by the PATH of the allocation's environment.
        output: where stdout and stderr go.
        visible: whether to try and let the information files appear at the contract's path.

    Returns:
        Its process id, which is its group's and its session's, too.

    Raises:
        CannotRun: there is no such program, or it cannot be run.
    """
    if visible:
        try:
            return _attempt(folder, command, output, visible=True)
        except _NotVisible:
            pass
    return _attempt(folder, command, output, visible=False)


class _NotVisible(Exception):
    pass


def _attempt(folder: str, command: list[str], output: tuple[int, int], *, visible: bool) -> int:
    told, tell = os.pipe()
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(output[0], 1)
            os.dup2(output[1], 2)
            _become(folder, command, worker, tell, visible=visible)
        finally:
            os._exit(127)
    os.close(tell)
    with open(told, "rb") as f:
        failure = f.read().decode(errors="replace")
    if not failure:
        return pid
    os.waitpid(pid, 0)
    number, _, message = failure.partition(" ")
    if number == "-":
        raise _NotVisible(message)
    raise CannotRun(127 if int(number) in (errno.ENOENT, errno.ENOTDIR) else 126, message)


def _become(folder: str, command: list[str], worker: int, tell: int, *, visible: bool) -> None:
    """Turn this process, just forked, into the command; tell what is in the way."""
    work = os.path.join(folder, "work")
    if visible:
        try:
            appear(os.path.join(folder, "info"), work, os.path.join(folder, "stage"))
        except Exception as e:
            os.write(tell, f"- {e}".encode())
            os._exit(127)
    environment: dict[str, str] = {}
    try:
        environment = dict(word.split("=", 1) for word in words(os.path.join(folder, "environment")))
        os.chdir(work)
        for signum in _DEFAULTS:
            signal.signal(signum, signal.SIG_DFL)
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == worker:
            os.execvpe(command[0], command, environment)
    except Exception as e:
        number = e.errno if isinstance(e, OSError) and e.errno else errno.ENOEXEC
        reason = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e)
        if number == errno.EACCES and not _exists(command[0], environment):  # a folder of PATH is closed to us
            number, reason = errno.ENOENT, os.strerror(errno.ENOENT)
        os.write(tell, f"{number} cannot run {command[0]}: {reason}".encode())


def _exists(program: str, environment: dict[str, str]) -> bool:
    if "/" in program:
        return True
    return any(os.path.exists(os.path.join(folder, program)) for folder in os.get_exec_path(environment))
