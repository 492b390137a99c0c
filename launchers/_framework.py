"""What launchers around a framework's own program share: from the command line to that program.

A launcher is a :class:`Framework` and a ``main`` of three lines; see ``deepspeed.py``.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from det_core._env import Environment

from ._machines._hosts import Host
from ._machines._place import Place, is_here
from ._machines._places import find_place
from ._machines._secret import job_secret
from ._supervisor._agent import Control
from ._supervisor._launch import launch
from ._words._options import UsageError
from ._words._parser import HelpWanted, Parser, Words
from ._wrapper import command


@dataclass(frozen=True)
class Job:
    """What a framework's program is to run."""

    asked: argparse.Namespace
    """The launcher's options; None for those that were not given."""
    place: Place
    """The machines, and how many ranks each gets."""
    grace: float
    """Seconds that scripts get to end."""
    theirs: list[str]
    """Options that a person gave for the program."""
    wrapped: list[str]
    """The command that the program is to start for each rank: our wrapper with the script in it."""
    folder: str
    """Private to this job; removed when it ends."""
    control: Control
    """For notices."""
    environment: Environment
    """The launcher's; the program gets ``os.environ``."""
    alone: list[Host] = field(default_factory=list)
    """The other machines whose wrappers do not reach the launcher."""

    @property
    def socket_path(self) -> str:
        """Where wrappers connect."""
        return f"{self.folder}/s"

    def others(self) -> list[Host]:
        """The machines that are not this one."""
        if not self.place.several:
            return []
        return [host for host in self.place.hosts if not is_here(host.name)]


@dataclass(frozen=True)
class Framework:
    """A framework with a program of its own that starts ranks."""

    name: str
    """The name of our module."""
    program: str
    """Its program, as a person knows it ("horovodrun")."""
    help: str
    """What ``--help`` prints."""
    rank_variables: str
    """The variables in which it gives a process its rank, by comma, tried in order."""
    one_for_all: bool
    """Whether one run of the program starts the ranks of all machines; else one runs on each machine."""
    command: Callable[[Job], list[str]]
    """The command line of the program. It may change ``os.environ``, and raise UsageError (exit status 2), or
    CannotStart or MissingExtra (exit status 1)."""
    one_per_machine: bool = False
    """Whether each machine has one rank and the framework no program: ``command`` returns our wrapper then."""
    own_parser: bool = False
    """Whether it mistakes words of the script for options of its own, so that they should not stand on its command
    line. Not with ``one_for_all``."""
    add_options: Callable[[Parser], object] = lambda parser: None
    """Adds options of its own to the parser."""


def run(framework: Framework, words: list[str] | None = None) -> int:
    """Run a launcher on ``words`` (default: this process's arguments) and return its exit status."""
    arguments = sys.argv[1:] if words is None else words
    if arguments[:1] in (["-h"], ["--help"]):
        return print_help(framework)
    return launch(framework.program, lambda control, path: run_agent(framework, arguments, control, path))


def print_help(framework: Framework) -> int:
    """Print the help and return 0."""
    try:
        print(framework.help, end="", flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def run_agent(framework: Framework, arguments: list[str], control: Control, path: str) -> None:
    """Become the framework's program.

    Raises:
        UsageError, CannotStart, MissingExtra: it is not to be.
    """
    environment = read_environment()
    words = read_words(framework, arguments, environment)
    if words is None:
        return control.quit(0)
    place = find_place(words.asked, environment, framework.program, one_for_all=framework.one_for_all)
    if framework.one_for_all and place.node_rank > 0:
        raise UsageError(
            f"{framework.program} starts the ranks of all machines from the first one, and this is machine "
            f"{place.node_rank} of {place.where}"
        )
    if framework.one_per_machine:
        place = replace(place, hosts=tuple(replace(host, slots=1) for host in place.hosts), notice="")
    os.environ.update(job_variables(environment, words, place, one_for_all=framework.one_for_all))
    host = socket.gethostname() if framework.one_for_all and place.several else ""
    folder = os.path.dirname(path)
    file = f"{folder}/run" if framework.own_parser else None
    wrapped = command(path, framework.rank_variables, words.run, host=host, file=file)
    job = Job(words.asked, place, words.options.grace, words.theirs, wrapped, folder, control, environment)
    program = framework.command(job)
    if place.notice:
        control.notice(place.notice)
    control.plan(_ranks(framework, job), words.options)
    control.become(program, ours=framework.one_per_machine, others=bool(job.alone))


def read_words(framework: Framework, arguments: list[str], environment: Environment) -> Words | None:
    """What the command line says; None: it asked for help, which is printed.

    Raises:
        UsageError: it cannot be understood.
    """
    parser = Parser(framework.name, framework.program, environment.grace)
    framework.add_options(parser)
    try:
        return parser.split(arguments)
    except HelpWanted:
        print_help(framework)
        return None


def _ranks(framework: Framework, job: Job) -> int:
    """How many ranks the launcher is going to hear of."""
    if not framework.one_for_all:
        return job.place.here.slots
    if job.alone:
        names = ", ".join(host.name for host in job.alone)
        job.control.notice(f"on {names} each rank stands alone: only {framework.program} tells how it ended")
    return job.place.size - sum(host.slots for host in job.alone)


def read_environment() -> Environment:
    """The environment.

    Raises:
        UsageError: a variable in it cannot be used.
    """
    try:
        return Environment.read()
    except ValueError as e:
        raise UsageError(str(e)) from e


def job_variables(environment: Environment, words: Words, place: Place, *, one_for_all: bool) -> dict[str, str]:
    """Variables that every rank of a job gets, whatever the framework.

    Raises:
        UsageError: several machines need one secret, and this launcher cannot tell the others.
    """
    alone = one_for_all or not place.several
    secret = job_secret(environment, machines=1 if alone else len(place.hosts), command=words.typed)
    if place.several and environment.secret:
        secret = {"DET_CORE_SECRET": environment.secret}  # wherever it stood, the other machines may not have it
    unbuffered = os.environ.get("PYTHONUNBUFFERED") or "1"  # so that a print is seen when it is made
    chief = {"DET_CHIEF_IP": place.chief} if place.several else {}
    return {**secret, **chief, "DET_CORE_COMMAND": words.typed, "PYTHONUNBUFFERED": unbuffered}
