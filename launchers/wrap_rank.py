"""``python -m det_core.launch.wrap_rank``: one rank that another program starts, with its number before every line."""

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
"""Directory from which a cluster of the wire contract collects output, past any program in between (section 14.5)."""
HELP = """\
usage: python -m det_core.launch.wrap_rank [--no-redirect-stdio] RANK [--] script.py [ARGS...]
       python -m det_core.launch.wrap_rank [--no-redirect-stdio] RANK [--] COMMAND [ARGS...]

Runs one script with [rank=N] before every line of its output, which is not decoded. Signals are forwarded, the exit
status is the script's, and if the process that started this one dies, the script and its descendants are killed.

RANK is a number, or names of variables separated by commas: the first one that is set counts.

examples:
  mpirun -np 4 python -m det_core.launch.wrap_rank OMPI_COMM_WORLD_RANK train.py
  torchrun --max-restarts 3 --no-python python -m det_core.launch.wrap_rank RANK train.py

options:
  --no-redirect-stdio  write to this process's stdout and stderr, even if
                       /run/determined/train/logs/{stdout,stderr}.log exist
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the script that ``arguments`` (default: this process's) name, and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_and_report(lambda: _run(words), HELP)


def _run(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        raise HelpRequested
    redirect = True
    while words and words[0].startswith("-") and words[0] != "--":
        option = words.pop(0)
        if option != "--no-redirect-stdio":
            raise UsageError(f"unknown option: {option} (see --help)")
        redirect = False
    script = words[1:]
    if script[:1] == ["--"]:
        script = script[1:]
    if not script or not words[0]:
        raise CannotStart("no script to run: expected RANK and a script (see --help)")
    spec = RankSpec(rank_of(words[0]), script_command(script[0], script[1:]), dict(os.environ))
    if redirect:
        redirect_output(LOGS)
    return run(Job([spec], grace=math.inf, tail=0, single_rank=True))


def rank_of(variables: str) -> int:
    """Return the rank.

    Args:
        variables: a number, or names of variables separated by commas, the first of which that is set counts.

    Raises:
        CannotStart: If none of them is set to a number.
    """
    for value in (variables, *(os.environ.get(name, "") for name in variables.split(","))):
        if value.isdigit():
            return int(value)
    raise CannotStart(f"unknown rank: none of {variables} is set to a number")


def redirect_output(folder: str) -> None:
    """Replace stdout and stderr by the cluster's files, each if it exists."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):
            file = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            os.dup2(file, fd)
            os.close(file)


if __name__ == "__main__":
    raise SystemExit(main())
