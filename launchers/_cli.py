"""What all launchers share: the command line, the variables of every rank, and how mistakes are run_and_report.

A launcher is a :class:`Framework` and a ``main`` of one line; the simplest is ``deepspeed.py``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from det_core._env import Environment
from det_core._notices import open_standard_streams, write_quietly
from det_core.errors import DetCoreError

from . import _job
from ._hosts import CannotStart, Layout, UsageError, find_layout, gpus, write_hostfile
from ._links import LINK_TIMEOUT, Link
from ._output import PREFIX
from ._ports import check_reachable

DEFAULT_GRACE = 60.0
"""Seconds that scripts get to save and exit, if neither ``--grace`` nor ``DET_CORE_GRACE`` says otherwise."""
DEFAULT_TAIL = 20
TRIALS = ("torch_distributed", "horovod", "deepspeed")
"""The launchers under which trial classes run."""
BEHAVIOR = """\
  every line of output starts with [rank=N], and no line is cut by another rank's;
  SIGTERM, Ctrl-C or SIGHUP reaches each script once, and all have --grace seconds to save; a third Ctrl-C kills;
  when one rank fails, on any machine, the others have --grace seconds to end;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; and nothing of the job outlives the launcher.

where it runs, unless options say so:
  in an allocation of a master, its containers and slots; in a job of Slurm, its nodes (start one launcher on each:
  srun --ntasks-per-node=1); under mpirun, one machine per process of it; else this machine
"""
OPTIONS = f"""\
  --nproc-per-node N   processes on each machine (default: one per slot or GPU)
  --nnodes N --node-rank R --master-addr HOST
                       so many machines with a launcher on each; which one this is, from 0 on; the first one's address
  --hosts NAME:N,NAME:N or --hostfile FILE, with lines of `NAME slots=N`
                       the machines by name, among which each finds itself
  --master-port PORT   where the ranks meet (default: a free one on one machine, else 29500)
  --launcher-port PORT where the launchers of several machines meet (default: the port after that)
  --link-timeout SECONDS
                       how long the launchers of several machines wait for each other (default: {LINK_TIMEOUT:g})
  -m, --module         run a module, as python -m does
  --no-python          run the script as a command, whatever it is
  --grace SECONDS      how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP, or when another rank
                       has failed; what still runs then is killed (default: DET_CORE_GRACE, else {DEFAULT_GRACE:g})
  --tail LINES         how many last lines of the first failed rank are shown at the end (default: {DEFAULT_TAIL})

The first word that is no option is the script; all after it is the script's, and so is a later --.
"""


@dataclass(frozen=True)
class Framework:
    """What is a framework's own: how its ranks know each other."""

    name: str
    """The name of our module."""
    help: str
    """What ``--help`` prints before the options."""
    variables: Callable[[Layout, CommandLine, Environment], list[dict[str, str]]]
    """What each rank of this machine gets besides what all get. It may raise UsageError (exit status 2), or
    CannotStart or a DetCoreError (exit status 1)."""
    adjust: Callable[[Layout, CommandLine], Layout] = lambda layout, command_line: layout
    """Changes how many ranks there are."""
    command: Callable[[Layout, list[str]], list[str]] = lambda layout, script: script
    """Returns the command that each rank of this machine runs, given that of the script."""
    add_options: Callable[[Parser], object] = lambda parser: None
    """Adds options of its own, or its own spellings: ``parser.add_argument("-H", dest="hosts")``."""
    program: str = ""
    """The framework's own launcher, if options of that one may stand before a ``--``."""
    unknown: str = ""
    """What to add where an option is not known."""
    unset: tuple[str, ...] = ()
    """Variables that ranks do not inherit."""
    hostfile: str = ""
    """The variable that names ranks a file with all machines, if the framework has one."""


def launch(framework: Framework, arguments: list[str] | None = None) -> int:
    """Run a launcher on ``arguments`` (default: this process's) and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_and_report(lambda: _launch(framework, words), framework.help + OPTIONS)


def _launch(framework: Framework, arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        raise HelpRequested
    environment = read_environment()
    parser = Parser(framework, environment.grace)
    command_line = parser.split(arguments)
    layout = framework.adjust(find_layout(command_line.options, environment), command_line)
    if layout.node_rank:
        check_reachable(layout.chief, layout.port)
    link = None
    if layout.multi_node and environment.secret:
        meet = command_line.options.launcher_port or layout.port + 1
        link = Link(layout, meet, environment.secret, command_line.options.link_timeout)
    try:
        job = _prepare(framework, layout, command_line, environment)
    except (UsageError, CannotStart, DetCoreError) as e:
        if link is None:
            raise
        notice = f"{e}\nwaiting until the other machines' launchers know of it (Ctrl-C ends that)"
        job = _job.Job([], 0.0, 0, notice=notice, failure=str(e), failure_status=_status(e))
    return _job.run(replace(job, link=link))


def _prepare(framework: Framework, layout: Layout, command_line: CommandLine, environment: Environment) -> _job.Job:
    """Return this machine's part of the job, of which nothing runs yet."""
    run = command_line.command  # a script that is missing is the first thing to say
    common, notice = job_variables(layout, command_line, environment)
    inherited = {name: value for name, value in os.environ.items() if name not in framework.unset}
    own = framework.variables(layout, command_line, environment)
    folder = ""
    if framework.hostfile and layout.multi_node:
        folder = tempfile.mkdtemp(prefix="det-core-")  # nobody else's, and removed with the job
        common[framework.hostfile] = write_hostfile(f"{folder}/hosts", layout.hosts)
    command = framework.command(layout, run)
    ranks = [
        _job.RankSpec(layout.first_rank + local, command, {**inherited, **common, **variables})
        for local, variables in enumerate(own)
    ]
    return _job.Job(
        ranks,
        command_line.options.grace,
        command_line.options.tail,
        notice=notice,
        batch=_shares_processors(ranks, environment),
        folder=folder,
    )


def _shares_processors(ranks: list[_job.RankSpec], environment: Environment) -> bool:
    """Whether ranks that wait for each other by spinning, as gloo's do, take the processor from those that compute."""
    return len(ranks) > 1 and len(ranks) >= len(os.sched_getaffinity(0)) and not gpus(environment)


def run_and_report(run: Callable[[], int], help: str) -> int:
    """What ``run`` returns; where it cannot, one line on stderr, and 2 for a mistake of the user's, else 1."""
    open_standard_streams()
    try:
        _require_working_directory()
        return run()
    except HelpRequested:
        write_quietly(help, sys.stdout)
        return 0
    except (UsageError, CannotStart, DetCoreError) as e:
        write_quietly(f"{PREFIX}{e}\n", sys.stderr)
        return _status(e)
    except KeyboardInterrupt:  # nothing runs yet
        return 130


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as e:
        raise CannotStart("the working directory was deleted, or cannot be read: cd to one that exists") from e


def _status(error: Exception) -> int:
    return 2 if isinstance(error, UsageError) else 1


def read_environment() -> Environment:
    """The environment.

    Raises:
        UsageError: a variable in it cannot be used.
    """
    try:
        return Environment.read()
    except ValueError as e:
        raise UsageError(str(e)) from e


def job_variables(layout: Layout, command_line: CommandLine, environment: Environment) -> tuple[dict[str, str], str]:
    """Variables that every rank gets, whatever the framework, and what to say."""
    notice, made = layout.notice, secrets.token_hex(32)
    found = {
        "DET_CORE_COMMAND": command_line.text,  # what a run that ends early says to type again
        # A print has to be seen when it is made, and not be lost with a process that is killed.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED") or "1",
    }
    if layout.multi_node:
        found["DET_CHIEF_IP"] = layout.chief
    if environment.secret:
        found["DET_CORE_SECRET"] = environment.secret  # wherever it stood
    elif not layout.multi_node:
        found["DET_CORE_SECRET"] = made
    else:
        notice += (
            "\nthere is no DET_CORE_SECRET: the launchers do not hear of failures on other machines, and det_core's "
            "ranks do not talk across machines. "
        )
        if layout.node_rank:  # one command only: secrets have to be equal
            notice += "Set the same on each: machine 0's launcher shows the command"
        else:
            notice += f"Set the same on each, with this one command\n    export DET_CORE_SECRET={made}"
    return found, notice.strip("\n")


class HelpRequested(Exception):
    """``--help`` stands among the options."""


@dataclass(frozen=True)
class CommandLine:
    """What a command line says."""

    options: argparse.Namespace
    """Every option of the parser as it was given; None where it was not."""
    framework_options: list[str]
    """Options that are not ours, which stood before a ``--``: the framework's."""
    script: list[str]
    """The script and its arguments."""
    text: str
    """The whole command line, to be typed again."""

    @cached_property
    def command(self) -> list[str]:
        """The command that each rank runs.

        Raises:
            UsageError: If there is no such script. That is not known of the other machines, so it is looked at only
                when they can be run_and_report.
        """
        asked = self.options
        return script_command(self.script[0], self.script[1:], module=asked.module, no_python=asked.no_python)


class Parser(argparse.ArgumentParser):
    """The options of a launcher.

    Args:
        framework: whose.
        grace: what ``DET_CORE_GRACE`` says.
    """

    def __init__(self, framework: Framework, grace: float | None = None) -> None:
        super().__init__(prog=f"python -m det_core.launch.{framework.name}", add_help=False, allow_abbrev=False)
        self._framework = framework
        self._words: list[str] = []
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("-m", "--module", action="store_true")
        self.add_argument("--no-python", "--no_python", action="store_true")
        self.add_argument("--trial")
        self.add_argument("--nproc-per-node", "--nproc_per_node", type=_processes)
        self.add_argument("--nnodes", type=number("a number", 1))
        self.add_argument("--node-rank", "--node_rank", type=number("a number", 0))
        self.add_argument("--master-addr", "--master_addr")
        self.add_argument("--master-port", "--master_port", type=port)
        self.add_argument("--launcher-port", type=port)
        self.add_argument("--link-timeout", type=_seconds, default=LINK_TIMEOUT)
        self.add_argument("--hostfile")
        self.add_argument("--hosts")
        self.add_argument("--grace", type=_seconds, default=DEFAULT_GRACE if grace is None else grace)
        self.add_argument("--tail", type=number("a number of lines", 0), default=DEFAULT_TAIL)
        framework.add_options(self)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`, with an option as it was typed."""
        if match := re.match(r"argument (\S+): ", message):
            spelled = (word for word in self._words if word.partition("=")[0] in match[1].split("/"))
            option = next(spelled, match[1])
            value = self._words[self._words.index(option) + 1 :][:1] if option in self._words else []
            message = f"{' '.join([option, *value])}: {message[match.end() :]}"
        raise UsageError(f"{message} (see --help)")

    def split(self, words: list[str]) -> CommandLine:
        """Read ``words``: the first one that is no option is the script, and all words after it are the script's.

        Options that are not known here may be the framework's, and need a ``--`` before the script then, as only the
        framework knows which of them have a value. With ``--trial`` they are the harness's.

        Raises:
            UsageError: an option cannot be read, or there is no script.
            HelpRequested: there is ``--help`` before the script.
        """
        end, unknown = self._end_of_options(words)
        program = self._framework.program
        if unknown and program and "--" in words[end:]:
            end = words.index("--", end)
        elif unknown and not any(word.partition("=")[0] == "--trial" for word in words[:end]):
            hint = f"; an option of {program} needs a -- before the script" if program else self._framework.unknown
            raise UsageError(f"unknown option: {unknown} (see --help{hint})")
        self._words = words[:end]
        asked, theirs = self.parse_known_args(words[:end])
        if asked.help:
            raise HelpRequested
        rest = words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]
        if asked.trial is not None:
            rest = ["--trial", asked.trial, *rest]
        if rest[:1] == ["--trial"] and self._framework.name not in TRIALS:
            raise UsageError(f"--trial: trial classes run under {', '.join(TRIALS)}, not under {self._framework.name}")
        if not rest:
            raise UsageError("no script to run (see --help)")
        return CommandLine(asked, theirs, rest, f"{self.prog} {shlex.join(words)}")

    def _end_of_options(self, words: list[str]) -> tuple[int, str]:
        """Where the options that are known end, and the one there that is not known."""
        place = 0
        while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
            option, equals, _ = words[place].partition("=")
            action = self._option_string_actions.get(option)
            if action is None:
                return place, option
            place += 1 if equals or action.nargs == 0 else 2
        return min(place, len(words)), ""


def number(what: str, least: int) -> Callable[[str], int]:
    """The type of an option that is a number."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {what}, {least} or more, not {text!r}")
        return int(text)

    return read


def _processes(text: str) -> int:
    if text in ("gpu", "auto"):  # torchrun's
        raise argparse.ArgumentTypeError("leave the option out: one process per GPU is the default")
    if text == "cpu":
        raise argparse.ArgumentTypeError('expected a number: --nproc-per-node "$(nproc)"')
    return number("a number", 1)(text)


def port(text: str) -> int:
    """The type of an option that is a port."""
    if not re.fullmatch(r"\d{1,5}", text) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, not {text!r}")
    return value


def script_command(script: str, arguments: list[str], *, module: bool = False, no_python: bool = False) -> list[str]:
    """The command that each rank runs.

    ``python script.py …`` runs as it stands, with the python that the shell would take. Otherwise a ``.py`` file, or
    any other file that is not executable, runs under the python that runs the launcher, as under ``torchrun``, and an
    executable runs as a command. ``--trial module:Class …`` runs that class, with the options of the harness after it.

    Args:
        script: the first word after the options.
        arguments: the words after it.
        module: ``script`` is the name of a module (``-m``).
        no_python: run ``script`` as a command whatever it is.

    Raises:
        UsageError: there is no such script or command.
    """
    if script == "--trial":
        if not arguments:
            raise UsageError("--trial: expected MODULE:CLASS, as in --trial model_def:MyTrial")
        return [sys.executable, "-m", "det_core.exec.harness", *arguments]
    if module and no_python:
        raise UsageError("-m runs a module with python and --no-python runs a command: give one of them")
    if module:
        return [sys.executable, "-m", script, *arguments]
    if no_python:
        return [_find(script), *arguments]
    if re.fullmatch(r"python(\d+(\.\d+)*)?t?", os.path.basename(script)):
        if arguments and not arguments[0].startswith("-"):
            _check_exists(arguments[0])
        return [_find(script), *arguments]
    if not script.endswith(".py"):
        if os.path.isfile(script) and os.access(script, os.X_OK):
            return [os.path.abspath(script), *arguments]
        if not os.path.exists(script) and "/" not in script and (found := shutil.which(script)):
            return [found, *arguments]
    _check_exists(script)
    return [sys.executable, script, *arguments]


def _check_exists(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"the script {script} does not exist (working directory: {os.getcwd()})")


def _find(command: str) -> str:
    if found := shutil.which(command):
        return found
    hint = f"; this launcher's own is {sys.executable}" if command.startswith("python") else ""
    raise UsageError(f"the command {command} was not found{' on PATH' if '/' not in command else ''}{hint}")
