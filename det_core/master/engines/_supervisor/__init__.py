"""The process that stands around a trial's script, and outlives the master.

It is two processes, made by one fork. The *worker* starts the script, carries its output into the log, obeys the
engine, and writes down how it ended; it adopts every orphan below it, and ends them all. The *guardian* only waits:
if the worker is killed, the guardian inherits what lived below it, ends it, saves what is left in the pipes, and
writes the end down.

Both import the standard library only, and nothing of det_core outside this folder: the engine starts them as
``python -I -S``, with this folder's parent as the only addition to the path, so that they are up at once.

All they know stands in the allocation's folder:

================  ===================================================================================
``command``       the script's command, words separated by NUL
``environment``   its variables, ``NAME=value``, separated by NUL
``work/``         where it runs
``info/``         the information files, which also appear at the contract's path
``log.jsonl``     what it wrote, in order: an object a line with time, stream and data
``processes``     who runs: ``guardian``, ``worker`` and ``script``, each with pid and start time
``exit.json``     how it ended; written last, whole or not at all
``lock``          locked while guardian or worker live
================  ===================================================================================
"""

from __future__ import annotations

import sys

__all__ = ["CONTROL", "LOCK", "command"]

LOCK, CONTROL = 3, 4
"""The descriptors a supervisor is born with: the locked file, and the socket on which it is told to end."""

_START = "import sys; sys.path.append(sys.argv[1]); from _supervisor._main import main; main(*sys.argv[2:])"


def command(folder: str, *, appear: bool) -> list[str]:
    """The command line of a supervisor.

    Args:
        folder: the allocation's folder.
        appear: whether the information files are to appear at the contract's path.
    """
    here = __file__.rsplit("/", 2)[0]
    return [sys.executable, "-I", "-S", "-c", _START, here, folder, "appear" if appear else "-"]
