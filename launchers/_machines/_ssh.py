"""The other machines of a job whose ranks one program starts: each gets the launcher's socket, brought by ssh.

That program only starts the wrappers there. What they print, say and are told goes over a connection of ours, so it
comes through as on this machine, whatever the bytes are and however long the program waits before it kills. The
variables that are nobody else's business go the same way: on a command line, by which a framework hands variables on,
every user of a machine can read them.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._words._options import CannotStart
from .._wrapper import python
from .._wrapper._handed import to_bytes

PATIENCE = 30.0
"""Seconds for all hosts to answer."""
SECRETS = ("DET_CORE_SECRET", "DET_SESSION_TOKEN", "DET_USER_TOKEN")
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "PasswordAuthentication=no",
    "StrictHostKeyChecking=no",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached."""

    port: int | None = None
    identity: str | None = None

    def command(self, host: str, words: str) -> list[str]:
        """The command line that runs ``words`` in a shell of ``host``."""
        port = ["-p", str(self.port)] if self.port else []
        identity = ["-i", self.identity] if self.identity else []
        return ["ssh", "-T", *(w for option in _OPTIONS for w in ("-o", option)), *port, *identity, host, words]


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not for a command line."""
    return {name: environ[name] for name in SECRETS if environ.get(name)}


def connect(hosts: Iterable[str], socket_path: str, ssh: Ssh) -> None:
    """Let wrappers on each host connect to ``socket_path`` as they do here.

    Called by the agent: the connections live until the launcher has no more use for them.

    Raises:
        CannotStart: a host cannot be reached.
    """
    content, launcher = to_bytes(secrets_of(os.environ)), str(os.getppid())
    far = shlex.join(python("_far", os.path.dirname(socket_path), str(len(content))))
    started = []
    for host in hosts:
        words = python("_near", launcher, socket_path, host, str(PATIENCE), *ssh.command(host, f"exec {far}"))
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin
        process.stdin.write(content)
        process.stdin.close()
        started.append((host, process))
    until = time.monotonic() + PATIENCE + 5
    for host, process in started:
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        said = process.stdout.readline().decode(errors="replace").strip() if ready else "it does not answer"
        if said != "ready":
            raise CannotStart(f"host {host} cannot be used over ssh: {said}")
