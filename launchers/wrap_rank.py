"""``python -m det_core.launch.wrap_rank``: one rank that another program starts, with its rank before every line."""

from __future__ import annotations

import contextlib
import math
import os
import sys

from ._cli import HelpRequested, run_and_report, script_command
from ._hosts import CannotStart, UsageError
from ._job import Job, RankSpec, run

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
  torchrun --max-restarts 3 --no-python python -m det_core.launch.wrap_rank RANK train.py

options:
  --no-redirect-stdio  write to this process's own stdout and stderr, even where there is
                       /run/determined/train/logs/{stdout,stderr}.log
"""


def main(words: list[str] | None = None) -> int:
    """Run the script that ``words`` (default: this process's arguments) name, and return its exit status."""
    return run_and_report(lambda: _run(list(sys.argv[1:] if words is None else words)), HELP)


def _run(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        raise HelpRequested
    redirect = True
    while words and words[0].startswith("-") and words[0] != "--":
        option = words.pop(0)
        if option != "--no-redirect-stdio":
            raise UsageError(f"unknown option: {option} (see --help)")
        redirect = False
    variables, words = (words[0], words[1:]) if words else ("", [])
    words = words[1:] if words[:1] == ["--"] else words
    if not variables or not words:
        raise CannotStart("no script to run: RANK and a script are needed (see --help)")
    start = RankSpec(rank_of(variables), script_command(words[0], words[1:]), dict(os.environ))
    if redirect:
        write_to_the_clusters_files(LOGS)
    return run(Job([start], grace=math.inf, tail=0, single_rank=True))


def rank_of(variables: str) -> int:
    """The rank: a number, or the value of the first of some variables, named with commas between, that is set.

    Raises:
        CannotStart: none of them is set to a number.
    """
    for value in (variables, *(os.environ.get(name, "") for name in variables.split(","))):
        if value.isdigit():
            return int(value)
    raise CannotStart(f"the rank of this process is not known: none of {variables} is set to a number")


def write_to_the_clusters_files(folder: str) -> None:
    """Put the cluster's files in the place of stdout and stderr, each if it is there."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):
            file = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            os.dup2(file, fd)
            os.close(file)


if __name__ == "__main__":
    raise SystemExit(main())
