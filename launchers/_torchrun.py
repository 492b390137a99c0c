"""Read torchrun's options with torchrun's own parser, and run its elastic agent around our wrappers."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
from typing import Any, NoReturn

from det_core._env import Environment
from det_core._info import get_cluster_info
from det_core._optional import require
from det_core.errors import MissingExtra

from ._machines._places import find_place
from ._machines._ports import check_free, check_reachable
from ._machines._secret import job_secret
from ._supervisor._agent import Control
from ._torchrun_help import print_help
from ._words._command import script_command
from ._words._options import UsageError, add_options, read_options
from ._wrapper import command

PROG = "python -m det_core.launch.torch_distributed"
_TOPOLOGY = ("nnodes", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "standalone")
_LEFT_OUT = ("nproc_per_node", "master_port", *_TOPOLOGY)
"""Options for which it matters whether they were given."""


class HelpWanted(Exception):
    """``--help`` stands among the options."""


class Parser(argparse.ArgumentParser):
    """torchrun's parser and our own options, with errors as :class:`UsageError`."""

    def __init__(self, torchrun: argparse.ArgumentParser, environment: Environment) -> None:
        super().__init__(prog=PROG, parents=[torchrun], add_help=False, conflict_handler="resolve")
        add_options(self, environment.grace)
        self._given_by_environment = {name[4:].lower() for name in environment.launch if name.startswith("PET_")}

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise UsageError(f"{message} (see --help)")

    def print_help(self, file: object = None) -> NoReturn:
        """Raise :class:`HelpWanted`."""
        raise HelpWanted

    def split(self, words: list[str]) -> tuple[argparse.Namespace, str, list[str]]:
        """The options, the first word that is none, and all words after it, untouched.

        argparse itself would take a later ``--`` away from the script, so it only sees the shortest start of the
        command line that has a positional argument.

        Raises:
            UsageError: an option cannot be read, or nothing but options is there.
        """
        defaults = {name: self.get_default(name) for name in _LEFT_OUT if name not in self._given_by_environment}
        self.set_defaults(**dict.fromkeys(defaults))
        failure = none = UsageError("no script to run (see --help)")
        for count in range(1, len(words) + 1):
            try:
                namespace, unknown = self.parse_known_args(words[:count])
            except UsageError as e:
                failure = none if "required: training_script" in str(e) else e
                continue
            if unknown == ["--trial"]:  # its place is behind a --, where it takes the place of a script
                place = words.index("--trial")
                self.set_defaults(**defaults)
                return self.split([*words[:place], "--", *words[place:]])
            if unknown:
                raise UsageError(f"unknown option: {' '.join(unknown)} (see --help)")
            namespace.given = {name for name in _LEFT_OUT if getattr(namespace, name) is not None}
            for name, default in defaults.items():
                if name not in namespace.given:
                    setattr(namespace, name, default)
            return namespace, namespace.training_script, words[count:]
        raise failure


def run_agent(words: list[str], control: Control, socket_path: str) -> None:
    """Run the elastic agent to its end, in this process.

    Args:
        words: the launcher's command line.
        control: told what is going to run, and whether the agent did its work.
        socket_path: where the wrappers connect.

    Raises:
        UsageError: the command line cannot be run.
    """
    gc.disable()
    try:
        torchrun: Any = require("torch.distributed.run", extra="torch", purpose="this launcher")
    except MissingExtra as e:
        return control.quit(1, str(e))
    try:
        environment = Environment.read()
    except ValueError as e:
        raise UsageError(str(e)) from e
    try:
        args, script, arguments = Parser(torchrun.get_args_parser(), environment).split(words)
    except HelpWanted:
        print_help()
        return control.quit(0)
    options = read_options(args)
    run = script_command(script, arguments, module=args.module, no_python=args.no_python)
    if not args.given & {*_TOPOLOGY}:
        _place(args, environment, control)
    nodes = _nodes(torchrun, args.nnodes)
    typed = f"{PROG} {shlex.join(words)}"
    os.environ.update(job_secret(environment, machines=nodes, command=typed))
    os.environ["DET_CORE_COMMAND"] = typed  # what a run that ends early says to type again
    args.nproc_per_node = str(_processes(torchrun, args, control))
    os.environ["USE_TORCH_DISTRIBUTED"] = "True"
    # A print has to be seen when it is made, and not be lost with a process that is killed: torchrun gives python -u
    # for that, which does not reach a python that the script itself, or a shell script, starts.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    meeting = {"master_port", "rdzv_backend", "rdzv_endpoint"}
    if nodes == 1 and not args.standalone and not args.given & meeting and args.node_rank == 0:
        args.standalone = True  # on a free port, so that two jobs on one machine do not meet
    if nodes > 1 and args.rdzv_backend == "static":
        _look_at_meeting(args)
    wrapped = command(socket_path, "RANK", run)
    args.no_python, args.module, args.run_path = True, False, False
    args.training_script, args.training_script_args = wrapped[0], wrapped[1:]
    if args.log_dir is None and args.redirects == args.tee == "0":
        args.log_dir = os.path.dirname(socket_path)  # torchrun would make a folder in /tmp, and leave it there
    if args.tee != "0":
        control.speak()  # it is the agent that shows the lines which it tees
    gc.freeze()  # torch's modules stay as long as this process: looking through them for garbage takes 0.1 s and more
    gc.enable()
    control.plan(int(args.nproc_per_node), options)
    _run(torchrun, args)
    control.done()


def _place(args: argparse.Namespace, environment: Environment, control: Control) -> None:
    """Fill in the machines of an allocation, of a job of Slurm or of an mpirun, where there are several."""
    nothing = dict.fromkeys(("nproc_per_node", "nnodes", "node_rank", "master_addr", "hostfile", "hosts", "processes"))
    port = args.master_port if "master_port" in args.given else None
    place = find_place(argparse.Namespace(**nothing, master_port=port), environment, "torchrun", one_for_all=False)
    if not place.several:
        return
    args.nnodes, args.node_rank = str(len(place.hosts)), place.node_rank
    args.master_addr, args.master_port = place.chief, place.port
    os.environ["DET_CHIEF_IP"] = place.chief
    if "nproc_per_node" not in args.given:
        args.nproc_per_node = str(place.here.slots)
        args.given.add("nproc_per_node")
        if place.notice:
            control.notice(place.notice)


def _look_at_meeting(args: argparse.Namespace) -> None:
    """Raise CannotStart at once for what torchrun finds out after a quarter of an hour, or says in many lines."""
    if args.node_rank == 0:
        check_free(args.master_port)
    else:
        check_reachable(args.master_addr, args.master_port)


def _run(torchrun: Any, args: argparse.Namespace) -> None:
    """Run the agent. That ranks have failed is not its failure: the wrappers tell of that."""
    errors = require("torch.distributed.elastic.multiprocessing.errors", extra="torch", purpose="this launcher")
    try:
        torchrun.run(args)
    except errors.ChildFailedError:
        return


def _processes(torchrun: Any, args: argparse.Namespace, control: Control) -> int:
    """How many processes to start on this machine, unless ``--nproc-per-node`` says so: one per slot of the trial, else
    one per GPU."""
    if "nproc_per_node" not in args.given:
        info = get_cluster_info()
        if info is not None and info.slot_ids:
            return len(info.slot_ids)
        if gpus := int(torchrun.torch.cuda.device_count()):
            return gpus
        control.notice("no GPU is visible: starting 1 process (--nproc-per-node N starts N)")
        return 1
    try:
        count = int(torchrun.determine_local_world_size(args.nproc_per_node))
    except ValueError as e:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: {e}") from e
    if count < 1:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: expected 1 or more, or one of auto, gpu, cpu")
    return count


def _nodes(torchrun: Any, text: str) -> int:
    """The largest number of machines that ``--nnodes`` allows."""
    try:
        fewest, most = torchrun.parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 0 < fewest <= most:
        raise UsageError(f"--nnodes {text}: expected a number above 0, or MIN:MAX")
    return int(most)
