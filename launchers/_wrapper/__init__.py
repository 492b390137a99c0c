"""The process that stands around each rank's script.

It imports the standard library only, and nothing of det_core outside this folder: the launcher starts it as
``python -I -S``, with this folder's parent as the only addition to the path, so that it is up in some 30 ms.
"""

from __future__ import annotations

import sys

__all__ = ["command"]

_START = "import sys; sys.path.append(sys.argv.pop(1)); from _wrapper._main import main; main()"


def command(socket_path: str, rank_variables: str, script: list[str]) -> list[str]:
    """The command line that runs ``script`` inside a wrapper.

    Args:
        socket_path: the launcher's socket.
        rank_variables: names of the variables in which the framework gives the rank, by comma, tried in order.
        script: the command to run.
    """
    folder = __file__.rsplit("/", 2)[0]
    return [sys.executable, "-I", "-S", "-c", _START, folder, socket_path, rank_variables, "--", *script]
