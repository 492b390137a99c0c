"""Scripts that begin with torch, forked from a process that has it: 0.1 CPU seconds instead of 3.4.

For tests whose subject is not the start itself. What differs from a cold start: the parent is the server, the hash seed
and the layout of memory are the same in all, and the interpreter's end stops after the functions of ``atexit``.
"""

from __future__ import annotations

import array
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support import TESTS, nest

WITH_TORCH = (
    "torch", "torch.distributed", "torch.utils.data", "numpy", "accelerate", "det_core.pytorch", "det_core.accelerated",
)  # fmt: skip
MODULES = (*(WITH_TORCH if importlib.util.find_spec("torch") else ()), "det_core.core", "det_core.client")


@dataclass(frozen=True, eq=False)
class Kind:
    """Set of modules that a server has loaded.

    Attributes:
        python: its interpreter.
        modules: what it imports.
        variables: those that the imports read, beside this process's.
    """

    python: str = sys.executable
    modules: Sequence[str] = MODULES
    variables: Mapping[str, str] = field(default_factory=dict)


HERE = Kind()
# A command that asks for a process of which the server has loaded the rest, and passes signals on to it.
_COMMAND = """#!{python} -IS
import array, json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
request = {{"argv": {before!r} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "session": False}}
request.update(python={executable!r}, tied=True)
descriptors = array.array("i", [0, 1, 2])
connection.sendmsg([json.dumps(request).encode() + b"\\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
told = connection.makefile("r")
pid = int(told.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(told.readline())
sys.exit(status if status >= 0 else 128 - status)
"""


class Server:
    """A server of one test process."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="warm", dir="/tmp")
        self.path, self.python = f"{self._folder.name}/socket", Path(self._folder.name, "python")
        self.add_command(self.python, str(self.python))
        command = [kind.python, str(TESTS / "support" / "warm_server.py"), self.path, *kind.modules]
        # A process with threads cannot be forked; how many a script has, it says itself.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        variables = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**variables, **kind.variables, **single}
        )
        nest.keep(self._process.pid, children=False)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int, session: bool
    ) -> Started:
        """Fork a process for a script and its arguments, or for ``-m`` and a module."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        request = {"argv": list(argv), "cwd": cwd, "env": dict(env), "session": session}
        fds = array.array("i", [stdin, stdout, stderr])
        connection.sendmsg([json.dumps(request).encode() + b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        return Started(connection)

    def add_command(self, path: Path, executable: str, before: Sequence[str] = ()) -> None:
        """Make a command whose arguments, after ``before``, are those of an interpreter.

        Args:
            path: where.
            executable: ``sys.executable`` of the script: what starts others like itself.
            before: the first arguments.
        """
        words = {"before": list(before), "executable": executable}
        path.write_text(_COMMAND.format(python=self._kind.python, socket=self.path, **words))
        path.chmod(0o755)

    def close(self) -> None:
        """End it, and all that it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


class Started:
    """The part of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._told = connection, connection.makefile("r")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status, or minus the number of the signal."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


_servers: dict[Kind, Server] = {}


def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    session: bool = False,
    kind: Kind = HERE,
) -> Started:
    """Start a script in a process that has torch and det_core loaded; the arguments are those of ``subprocess.Popen``.

    Args:
        argv: the script and its arguments, or ``-m``, a module, and its arguments.
        env: all variables; by default those of this process.
        cwd: the working directory.
        stdin: a descriptor; by default nothing can be read.
        stdout: a descriptor; by default this process's.
        stderr: a descriptor; by default that of stdout.
        session: whether it leads a session of its own.
        kind: which server forks it.
    """
    server = _server_of(kind)
    nothing = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
    try:
        out = 1 if stdout is None else stdout
        err = out if stderr is None else stderr
        words = [str(word) for word in argv]
        return server.start(words, env or os.environ, os.path.abspath(cwd or "."), nothing, out, err, session)
    finally:
        if stdin is None:
            os.close(nothing)


def run(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | str | None = None,
    kind: Kind = HERE,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script to its end, as ``subprocess.run(..., text=True)``; stderr is within stdout."""
    with tempfile.TemporaryFile() as output:
        status = start(argv, env=env, cwd=cwd, stdout=output.fileno(), kind=kind).wait()
        output.seek(0)
        return subprocess.CompletedProcess(list(map(str, argv)), status, output.read().decode(errors="replace"), "")


def python(kind: Kind) -> str:
    """Return a ``python`` that runs scripts and modules warm, as does every process started from ``sys.executable``."""
    return str(_server_of(kind).python)


def add_command(path: Path, before: Sequence[str] = ()) -> None:
    """Make a warm command as :meth:`Server.add_command` does; what it starts by ``sys.executable`` is as ever."""
    _server_of(HERE).add_command(path, HERE.python, before)


def _server_of(kind: Kind) -> Server:
    if kind not in _servers:
        _servers[kind] = Server(kind)
    return _servers[kind]


def close() -> None:
    """End the servers that were ever needed."""
    while _servers:
        _servers.popitem()[1].close()
