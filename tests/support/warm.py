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
from pathlib import Path

from support import TESTS, nest

WITH_TORCH = (
    "torch", "torch.distributed", "torch.utils.data", "numpy", "accelerate", "det_core.pytorch", "det_core.accelerated",
)  # fmt: skip
MODULES = (*(WITH_TORCH if importlib.util.find_spec("torch") else ()), "det_core.core", "det_core.client")


class Server:
    """The server of one test process.

    Args:
        modules: what it imports.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm", dir="/tmp")
        self.path = f"{self._folder.name}/socket"
        command = [sys.executable, str(TESTS / "support" / "warm_server.py"), self.path, *modules]
        # A process with threads cannot be forked; how many a script has, it says itself.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        variables = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**variables, **single}
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

    def close(self) -> None:
        """End it, and all that it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


class Started:
    """What a test wants of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._told = connection, connection.makefile("r")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or minus the number of the signal that ended it."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
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


_server: Server | None = None


def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    session: bool = False,
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
    """
    server = _the_server()
    nothing = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
    try:
        out = 1 if stdout is None else stdout
        err = out if stderr is None else stderr
        words = [str(word) for word in argv]
        return server.start(words, env or os.environ, os.path.abspath(cwd or "."), nothing, out, err, session)
    finally:
        if stdin is None:
            os.close(nothing)


def run(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | str | None = None,
        ) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script to its end, as ``subprocess.run(..., text=True)``; stderr is within stdout."""
    with tempfile.TemporaryFile() as output:
        status = start(argv, env=env, cwd=cwd, stdout=output.fileno()).wait()
        output.seek(0)
        return subprocess.CompletedProcess(list(map(str, argv)), status, output.read().decode(errors="replace"), "")


def socket_path() -> str:
    """Where the server listens, for a process that asks it by itself."""
    return _the_server().path


def _the_server() -> Server:
    global _server
    if _server is None:
        _server = Server()
    return _server


def close() -> None:
    """End the server, if it was ever needed."""
    global _server
    if _server is not None:
        _server.close()
        _server = None
