"""The process that stands around each rank's script.

It imports the standard library only, and nothing of det_core outside this folder: the launcher starts it as
``python -I -S``, with this folder's parent as the only addition to the path, so that it is up in some 30 ms.
"""

from __future__ import annotations

import os
import sys

__all__ = ["command", "python"]

_START = "import sys; sys.path.append(sys.argv.pop(1)); from _wrapper.{} import main; main()"


def python(module: str, *words: str) -> list[str]:
    """The command line that runs ``main`` of a module of this folder with ``words`` as its arguments."""
    return [sys.executable, "-I", "-S", "-c", _START.format(module), __file__.rsplit("/", 2)[0], *words]


def command(
    socket_path: str, rank_variables: str, script: list[str], *, host: str = "", file: str | None = None
) -> list[str]:
    """The command line that runs ``script`` inside a wrapper.

    Args:
        socket_path: the launcher's socket.
        rank_variables: names of the variables in which the framework gives the rank, by comma, tried in order.
        script: the command to run.
        host: the name of this machine, if the wrapper may find itself on another one: there it connects to the socket
            that ``_machines/_ssh`` has brought to it, or stands alone.
        file: written here, and read by the wrapper, if ``script`` is not to stand on the command line.
    """
    start = python("_main", socket_path, rank_variables, host)
    if file is None:
        return [*start, "--", *script]
    with open(file, "wb") as out:
        out.write(b"\0".join(os.fsencode(word) for word in script))
    return [*start, "@", file]
