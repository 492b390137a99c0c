"""Parts that all launchers share: command line, variables of every rank, report of errors.

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
"""Grace period in seconds without ``--grace`` and ``DET_CORE_GRACE``."""
DEFAULT_TAIL = 20
TRIALS = ("torch_distributed", "horovod", "deepspeed")
"""Launchers under which trial classes run."""
BEHAVIOR = """\
  every line of output starts with [rank=N], and ranks do not cut each other's lines;
  SIGTERM, Ctrl-C and SIGHUP reach each script once, and all have --grace seconds to save; a third Ctrl-C kills;
  when one rank fails, on any node, the others have --grace seconds to end;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; no process of the job outlives the launcher.

where it runs, without options:
  in an allocation of a master, its containers and slots; in a Slurm job, its nodes (start one launcher on each:
  srun --ntasks-per-node=1); under mpirun, one node per process of it; else this node
"""
OPTIONS = f"""\
  --nproc-per-node N   processes on each node (default: one per slot or GPU)
  --nnodes N --node-rank R --master-addr HOST
                       number of nodes, each with a launcher; number of this one, from 0; address of node 0
  --hosts NAME:N,NAME:N or --hostfile FILE, with lines of `NAME slots=N`
                       the nodes by name; each launcher finds itself among them
  --master-port PORT   where the ranks meet (default: a free port on a single node, else 29500)
  --launcher-port PORT where the launchers of several nodes meet (default: the port after --master-port)
  --link-timeout SECONDS
                       how long the launchers of several nodes wait for each other (default: {LINK_TIMEOUT:g})
  -m, --module         run a module, as python -m does
  --no-python          run the script as a command, even if it is a Python file
  --grace SECONDS      time for scripts to save and exit after SIGTERM, Ctrl-C or SIGHUP, or after the failure of
                       another rank; then they are killed (default: DET_CORE_GRACE, else {DEFAULT_GRACE:g})
  --tail LINES         number of last lines of the first failed rank shown at the end (default: {DEFAULT_TAIL})

The first word that is not an option is the script; everything after it is the script's, including a later --.
"""


@dataclass(frozen=True)
class Framework:
    """The part of a launcher that its framework decides: the variables by which ranks find each other."""

    name: str
    """Name of the module in ``det_core.launch``."""
    help: str
    """Text of ``--help`` before the options."""
    variables: Callable[[Layout, CommandLine, Environment], list[dict[str, str]]]
    """Returns the variables of each rank of this node, in addition to the common ones. May raise UsageError (exit
    status 2), CannotStart or a DetCoreError (exit status 1)."""
    adjust: Callable[[Layout, CommandLine], Layout] = lambda layout, command_line: layout
    """Changes the number of ranks."""
    command: Callable[[Layout, list[str]], list[str]] = lambda layout, script: script
    """Returns the command of each rank of this node, given the script's."""
    add_options: Callable[[Parser], object] = lambda parser: None
    """Adds the framework's options or spellings: ``parser.add_argument("-H", dest="hosts")``."""
    program: str = ""
    """The framework's own launcher, if its options may stand before a ``--``."""
    unknown: str = ""
    """Hint for an unknown option."""
    unset: tuple[str, ...] = ()
    """Variables that ranks do not inherit."""
    hostfile: str = ""
    """Variable with the path of a file of all nodes, if the framework reads one."""


def launch(framework: Framework, arguments: list[str] | None = None) -> int:
    """Run a launcher with ``arguments`` (default: this process's) and return its exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    return run_and_report(lambda: _launch(framework, arguments), framework.help + OPTIONS)


def _launch(framework: Framework, arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        raise HelpRequested
    environment = read_environment()
    command_line = Parser(framework, environment.grace or DEFAULT_GRACE).split(arguments)
    layout = framework.adjust(find_layout(command_line.options, environment), command_line)
    if layout.node_rank:
        check_reachable(layout.chief, layout.port)
    link = None
    if layout.multi_node and environment.secret:
        port = command_line.options.launcher_port or layout.port + 1
        link = Link(layout, port, environment.secret, command_line.options.link_timeout)
    try:
        job = _prepare(framework, layout, command_line, environment)
    except (UsageError, CannotStart, DetCoreError) as e:
        if link is None:
            raise
        notice = f"{e}\nwaiting until the other nodes' launchers have received this (Ctrl-C ends the wait)"
        job = _job.Job([], 0.0, 0, notice=notice, failure=str(e), failure_status=_status(e))
    return _job.run(replace(job, link=link))


def _prepare(framework: Framework, layout: Layout, command_line: CommandLine, environment: Environment) -> _job.Job:
    """Return this node's part of the job; no process of it has been started."""
    script = command_line.command  # first, so that a missing script is reported before anything else
    common, notice = job_variables(layout, command_line, environment)
    inherited = {name: value for name, value in os.environ.items() if name not in framework.unset}
    own = framework.variables(layout, command_line, environment)
    folder = ""
    if framework.hostfile and layout.multi_node:
        folder = tempfile.mkdtemp(prefix="det-core-")  # private to this user, and removed with the job
        common[framework.hostfile] = write_hostfile(f"{folder}/hosts", layout.hosts)
    command = framework.command(layout, script)
    ranks = [
        _job.RankSpec(layout.first_rank + local, command, {**inherited, **common, **variables})
        for local, variables in enumerate(own)
    ]
    return _job.Job(
        ranks,
        command_line.options.grace,
        command_line.options.tail,
        notice=notice,
        batch=_fills_processors(ranks, environment),
        folder=folder,
    )


def _fills_processors(ranks: list[_job.RankSpec], environment: Environment) -> bool:
    """Return whether there are as many ranks as processors, and no GPU."""
    # Ranks that wait in gloo spin, and would take the processor from those that compute.
    return len(ranks) > 1 and len(ranks) >= len(os.sched_getaffinity(0)) and not gpus(environment)


def run_and_report(run: Callable[[], int], help: str) -> int:
    """Run a launcher; print its errors as one line.

    Args:
        run: function that returns the exit status.
        help: text of ``--help``.

    Returns:
        The exit status of ``run``; after an error 2 if the command line is invalid, else 1.
    """
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
    except KeyboardInterrupt:  # before any rank has started
        return 130


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as e:
        raise CannotStart("the working directory was deleted or cannot be read: cd to another one") from e


def _status(error: Exception) -> int:
    if isinstance(error, UsageError):
        return 2
    return 1


def read_environment() -> Environment:
    """Return the environment.

    Raises:
        UsageError: If a variable is invalid.
    """
    try:
        return Environment.read()
    except ValueError as e:
        raise UsageError(str(e)) from e


def job_variables(layout: Layout, command_line: CommandLine, environment: Environment) -> tuple[dict[str, str], str]:
    """Return the variables that every rank gets under any framework, and a notice."""
    notice = layout.notice
    new_secret = secrets.token_hex(32)
    variables = {
        "DET_CORE_COMMAND": command_line.text,  # a run that ends early shows it as the command to resume
        # Buffered lines would appear late, and be lost with a process that is killed.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED") or "1",
    }
    if layout.multi_node:
        variables["DET_CHIEF_IP"] = layout.chief
    if environment.secret:
        variables["DET_CORE_SECRET"] = environment.secret  # also if it came from a file
    elif not layout.multi_node:
        variables["DET_CORE_SECRET"] = new_secret
    else:
        notice += (
            "\nDET_CORE_SECRET is not set: launchers receive no failures of other nodes, and det_core's ranks cannot "
            "connect across nodes; "
        )
        # Only one node prints a command: the secrets must be equal.
        if layout.node_rank:
            notice += "set it on each node: node 0's launcher shows the command"
        else:
            notice += f"on each node:\n    export DET_CORE_SECRET={new_secret}"
    return variables, notice.strip("\n")


class HelpRequested(Exception):
    """``--help`` is among the options."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    options: argparse.Namespace
    """Value of every option of the parser; None where it was not given and has no default."""
    framework_options: list[str]
    """Options of the framework's own launcher, from before a ``--``."""
    script: list[str]
    """Script and its arguments."""
    text: str
    """Whole command line, quoted for a shell."""

    @cached_property
    def command(self) -> list[str]:
        """Command that each rank runs.

        Raises:
            UsageError: If the script does not exist.
        """
        # Checked here and not by the parser: other nodes may have the script, and are notified once links exist.
        options = self.options
        return script_command(self.script[0], self.script[1:], module=options.module, no_python=options.no_python)


class Parser(argparse.ArgumentParser):
    """Options of a launcher.

    Args:
        framework: framework of the launcher.
        grace: default of ``--grace`` in seconds.
    """

    def __init__(self, framework: Framework, grace: float = DEFAULT_GRACE) -> None:
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
        self.add_argument("--grace", type=_seconds, default=grace)
        self.add_argument("--tail", type=number("a number of lines", 0), default=DEFAULT_TAIL)
        framework.add_options(self)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`, with the option as it was spelled."""
        if match := re.match(r"argument (\S+): ", message):
            spellings = (word for word in self._words if word.partition("=")[0] in match[1].split("/"))
            option = next(spellings, match[1])
            value = []
            if option in self._words:
                value = self._words[self._words.index(option) + 1 :][:1]
            message = f"{' '.join([option, *value])}: {message[match.end() :]}"
        raise UsageError(f"{message} (see --help)")

    def split(self, words: list[str]) -> CommandLine:
        """Parse ``words``: the first one that is not an option is the script, and all words after it are the script's.

        An option that is unknown here may be the framework's. Only the framework knows whether it has a value, so it
        needs a ``--`` before the script. With ``--trial`` unknown options are the harness's.

        Raises:
            UsageError: If an option is invalid, or the script is missing.
            HelpRequested: If ``--help`` stands before the script.
        """
        end, unknown = self._end_of_options(words)
        if unknown and self._framework.program and "--" in words[end:]:
            end = words.index("--", end)
        elif unknown and not any(word.partition("=")[0] == "--trial" for word in words[:end]):
            self._refuse_option(unknown)
        self._words = words[:end]
        options, framework_options = self.parse_known_args(words[:end])
        if options.help:
            raise HelpRequested
        script = words[end:]
        if script[:1] == ["--"]:
            script = script[1:]
        if options.trial is not None:
            script = ["--trial", options.trial, *script]
        if script[:1] == ["--trial"] and self._framework.name not in TRIALS:
            raise UsageError(f"--trial: trial classes run under {', '.join(TRIALS)}, not under {self._framework.name}")
        if not script:
            raise UsageError("no script to run (see --help)")
        return CommandLine(options, framework_options, script, f"{self.prog} {shlex.join(words)}")

    def _refuse_option(self, option: str) -> NoReturn:
        hint = self._framework.unknown
        if self._framework.program:
            hint = f"; an option of {self._framework.program} needs a -- before the script"
        raise UsageError(f"unknown option: {option} (see --help{hint})")

    def _end_of_options(self, words: list[str]) -> tuple[int, str]:
        """Return the index after the known options, and the unknown option there or an empty text."""
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
            option, equals, _ = words[index].partition("=")
            action = self._option_string_actions.get(option)
            if action is None:
                return index, option
            index += 1
            if not equals and action.nargs != 0:
                index += 1  # its value
        return min(index, len(words)), ""


def number(noun: str, minimum: int) -> Callable[[str], int]:
    """Return the argparse type of an option that is a number of at least ``minimum``."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,6}", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected {noun}, {minimum} or more, not {text!r}")
        return int(text)

    return parse


def _processes(text: str) -> int:
    if text in ("gpu", "auto"):  # torchrun's
        raise argparse.ArgumentTypeError("leave the option out: one process per GPU is the default")
    if text == "cpu":
        raise argparse.ArgumentTypeError('expected a number: --nproc-per-node "$(nproc)"')
    return number("a number", 1)(text)


def port(text: str) -> int:
    """Return the port in an option's text."""
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
    """Return the command that each rank runs.

    ``python script.py …`` runs unchanged, with the python that a shell would choose. Otherwise a ``.py`` file, or
    any other file that is not executable, runs under the launcher's python, as under ``torchrun``, and an executable
    runs as a command. ``--trial module:Class …`` runs that class, with the harness's options after it.

    Args:
        script: first word after the options.
        arguments: words after it.
        module: whether ``script`` is the name of a module (``-m``).
        no_python: whether to run ``script`` as a command even if it is a Python file.

    Raises:
        UsageError: If the script or command does not exist.
    """
    if script == "--trial":
        if not arguments:
            raise UsageError("--trial: expected MODULE:CLASS, as in --trial model_def:MyTrial")
        return [sys.executable, "-m", "det_core.exec.harness", *arguments]
    if module and no_python:
        raise UsageError("-m (a module under python) and --no-python (a command) are exclusive: pass one of them")
    if module:
        return [sys.executable, "-m", script, *arguments]
    if no_python:
        return [_find_command(script), *arguments]
    if re.fullmatch(r"python(\d+(\.\d+)*)?t?", os.path.basename(script)):
        if arguments and not arguments[0].startswith("-"):
            _check_exists(arguments[0])
        return [_find_command(script), *arguments]
    if not script.endswith(".py"):
        if os.path.isfile(script) and os.access(script, os.X_OK):
            return [os.path.abspath(script), *arguments]
        if not os.path.exists(script) and "/" not in script and (path := shutil.which(script)):
            return [path, *arguments]
    _check_exists(script)
    return [sys.executable, script, *arguments]


def _check_exists(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"the script {script} does not exist (working directory: {os.getcwd()})")


def _find_command(command: str) -> str:
    if path := shutil.which(command):
        return path
    message = f"command not found: {command}"
    if "/" not in command:
        message += " (searched PATH)"
    if command.startswith("python"):
        message += f"; the launcher's own python is {sys.executable}"
    raise UsageError(message)
