"""``python -m det_core.launch.wrap_rank``: one script, with its rank before every line."""

from __future__ import annotations

import contextlib
import os
import sys

from ._supervisor._notices import PREFIX
from ._words._command import script_command
from ._words._options import UsageError
from ._wrapper._alone import Alone
from ._wrapper._rank import rank_of

__all__ = ["main"]

LOGS = "/run/determined/train/logs"
"""Where a cluster of the wire contract's kind takes output, past whatever stands in between (section 14.5)."""
HELP = """\
usage: python -m det_core.launch.wrap_rank [--no-redirect-stdio] RANK [--] script.py [ARGS...]
       python -m det_core.launch.wrap_rank [--no-redirect-stdio] RANK [--] COMMAND [ARGS...]

Runs one script with [rank=N] before every line of its output, whatever the bytes are. Signals are passed on, the exit
status is the script's, and when the process that started this one dies, the script and all it started are killed.

RANK is a number, or the name of the variable that holds it, or several with commas between: the first that is set.

examples:
  mpirun -np 4 python -m det_core.launch.wrap_rank OMPI_COMM_WORLD_RANK train.py
  python -m det_core.launch.wrap_rank 3 ./worker --fast

options:
  --no-redirect-stdio  write to this process's own stdout and stderr, even where there is
                       /run/determined/train/logs/{stdout,stderr}.log
"""


def main(words: list[str] | None = None) -> int:
    """Run the script that ``words`` (default: this process's arguments) name, and return its exit status."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    redirect = True
    while words and words[0].startswith("-") and words[0] != "--":
        option = words.pop(0)
        if option != "--no-redirect-stdio":
            return _refuse(f"unknown option: {option} (see --help)", 2)
        redirect = False
    variables, words = (words[0], words[1:]) if words else ("", [])
    if words[:1] == ["--"]:
        words = words[1:]
    if not variables or not words:
        return _refuse("no script to run: RANK and a script are needed (see --help)", 1)
    try:
        rank, run = rank_of(variables), script_command(words[0], words[1:])
    except UsageError as e:
        return _refuse(str(e), 2)
    except SystemExit as e:
        return _refuse(str(e), 1)
    return Alone(rank).run(run, *(_log("stdout", 1), _log("stderr", 2)) if redirect else (1, 2))


def _log(name: str, otherwise: int) -> int:
    """The cluster's file for a stream, if there is one."""
    with contextlib.suppress(OSError):
        return os.open(f"{LOGS}/{name}.log", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    return otherwise


def _refuse(why: str, status: int) -> int:
    print(f"{PREFIX}{why}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
