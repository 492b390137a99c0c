"""horovodrun as it is, but for one thing: it puts no secret on a command line.

It hands variables to its ranks in the words of the command that starts them, which every user of the machine can read.
Ranks on this machine inherit these ones; to other machines they go by :mod:`_machines._ssh`.
"""

from __future__ import annotations

import sys

from det_core._optional import require

from ._machines._ssh import SECRETS

COMMAND = "from det_core.launch._horovodrun import main; main()"
"""For ``python -c``: processes that multiprocessing starts load a ``__main__`` that is a file or a module once more."""


def main() -> None:
    """Run horovodrun on this process's arguments."""
    sys.argv[0] = "horovodrun"
    env = require("horovod.runner.common.util.env", extra="horovod", purpose="this launcher")
    launch = require("horovod.runner.launch", extra="horovod", purpose="this launcher")
    env.IGNORE_REGEXES.update(f"{name}$" for name in SECRETS)
    launch.run_commandline()
