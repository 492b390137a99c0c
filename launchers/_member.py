"""A launcher that is itself one rank: somebody's ``mpirun`` or ``srun`` has started it once for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ._framework import Framework, read_environment, read_words
from ._machines._secret import job_secret
from ._supervisor._agent import Control
from ._supervisor._launch import launch
from ._words._options import UsageError
from ._words._parser import HelpWanted, Parser
from ._wrapper import command

_SIZES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("PMI_SIZE", "MPI_LOCALNRANKS"))


def is_member(framework: Framework, words: list[str]) -> bool:
    """Whether this launcher is one rank of a job: so its variables say, and no option asks for ranks."""
    if not any(os.environ.get(name, "").isdigit() for name in framework.rank_variables.split(",")):
        return False
    parser = Parser(framework.name, framework.program)
    framework.add_options(parser)
    try:
        asked = parser.split(words).asked
    except (UsageError, HelpWanted):
        return True  # who comes to it in his turn says so
    return not (asked.processes or asked.nproc_per_node or asked.hosts or asked.hostfile)


def run_member(framework: Framework, words: list[str] | None = None) -> int:
    """Run the script of one rank and return its exit status."""
    arguments = sys.argv[1:] if words is None else words
    return launch("the wrapper", lambda control, path: _become_wrapper(framework, arguments, control, path))


def _become_wrapper(framework: Framework, arguments: list[str], control: Control, path: str) -> None:
    environment = read_environment()
    words = read_words(framework, arguments, environment)
    if words is None:
        return control.quit(0)
    if _several_machines(os.environ):
        job_secret(environment, machines=2, command=words.typed)  # only to refuse: each rank would make another
    os.environ["DET_CORE_COMMAND"] = words.typed
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    control.plan(1, words.options)
    control.become(command(path, framework.rank_variables, words.run), ours=True)


def _several_machines(variables: Mapping[str, str]) -> bool:
    sizes = next(((variables[a], variables.get(b, "1")) for a, b in _SIZES if variables.get(a)), ("1", "1"))
    return sizes[0] != sizes[1]
