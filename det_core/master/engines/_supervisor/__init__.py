"""Supervisors: one process around each trial's script, which outlives the master.

A supervisor starts the script, logs its output, ends whatever the script leaves behind, and writes down how it ended.
If the supervisor itself is killed, the kernel kills the script with it, and the engine ends the rest.

It imports the standard library and ``det_core._standalone`` only, and is started as ``python -I -S`` so that it is up
at once. The allocation's folder is the whole protocol, so that whoever can start this process is an engine:

================  ===================================================================================
``start.json``    the script's ``command`` and ``environment``, and the rank of its ``node``
``work/``         where it runs
``info/``         the information files, which also appear at the contract's path
``kill``          the order to end: its number, and the seconds that are left, which the supervisor counts
``log/``          the script's output, as lines in segments; see ``_log``
``processes``     who runs: ``supervisor`` and ``script``, each with pid and start time
``exit.json``     how it ended; written last, whole or not at all
``lock``          locked while the supervisor lives
================  ===================================================================================
"""

from __future__ import annotations

import os
import sys

__all__ = ["LOCK", "command"]

LOCK = 3
"""Descriptor that a supervisor is born with: the locked file."""
_START = "import sys; sys.path += sys.argv[1:3]; from _supervisor._program import main; main(sys.argv[3])"


def command(folder: str) -> list[str]:
    """Return the command line of the supervisor of an allocation's folder."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.join(here, *[os.pardir] * 3)
    return [sys.executable, "-I", "-S", "-c", _START, here, root, folder]
