"""``det-core run``: one script as a trial, without a file."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from det_core.cli._commands import COMMANDS
from det_core.cli._say import count, error, note, print_json
from det_core.cli._session import ABOUT_MASTERS, command_for, master_options, on_master
from det_core.cli._status import CANCELED, FAILED, NOT_UNDERSTOOD

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

_EXAMPLES = """\
examples:
  det-core run -- python train.py --lr 0.1
  det-core run --slots 2 -- python -m det_core.launch.torch_distributed train.py
  det-core run --name first-try --max-restarts 3 --detach -- python train.py

The command runs in a copy of the current folder, but for what .detignore names (patterns as in .gitignore), .git and
virtual environments; what it prints is printed here, and its exit status is that of this command. Ctrl-C (or
SIGTERM) stops watching, not the script. `python` is the Python that the master was started with."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = f"{_EXAMPLES}\n\n{ABOUT_MASTERS}"
    parser.usage = "det-core run [options] [--] COMMAND …"
    parser.add_argument("--name", help="the experiment's name (default: that of the script)")
    parser.add_argument("--slots", type=count, default=1, metavar="N", help="slots (GPUs) that it gets (default: 1)")
    parser.add_argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="N",
        help="how often to start it again if it fails (default: 0)",
    )
    parser.add_argument("--config", metavar="KEY=VALUE", action="append", default=[], help="more of a configuration")
    parser.add_argument("--detach", "-d", action="store_true", help="do not watch it: print its number, and end")
    parser.add_argument("--json", action="store_true", help="print the experiment as an object, and no output of it")
    master_options(parser)
    parser.add_argument("COMMAND", nargs=argparse.REMAINDER, help="the command, and its arguments")
    parser.set_defaults(run_command=run, DIR=".", paused=False, check=False)


def run(args: argparse.Namespace) -> int:
    """Run a command as the one trial of an experiment."""
    command = script_of(args)
    if command is None:
        return NOT_UNDERSTOOD
    return on_master(lambda args, master: _run(args, master, command))(args)


def script_of(args: argparse.Namespace) -> list[str] | None:
    """Return the command of the trial; None if there is none, which was printed."""
    command: list[str] = args.COMMAND[1:] if args.COMMAND[:1] == ["--"] else args.COMMAND
    if args.COMMAND[:1] != ["--"] and command and command[0] in COMMANDS["runs"].subcommands:
        error(
            f"to run the command {command[0]!r}: det-core run -- {command[0]}; or did you mean `det-core runs "
            f"{command[0]}`?"
        )
        return None
    if not command:
        error("there is no command to run: det-core run -- python train.py")
        return None
    return command


def _run(args: argparse.Namespace, master: Master, command: list[str]) -> int:
    from det_core.cli.experiment._create import submit
    from det_core.cli.experiment._follow import follow
    from det_core.cli.experiment._told import as_json

    experiment = submit(args, master, config_of(args, command), args.config)
    if experiment is None:
        return NOT_UNDERSTOOD
    if args.detach and args.json:
        print_json(as_json(experiment))
    elif args.detach:
        print(f"created experiment {experiment.id} ({experiment.name})")
        note(f"to watch it: {command_for(args, 'experiment', 'logs', experiment.id, '-f')}")
    if args.detach:
        return 0
    follow(args, experiment, quiet=args.json, raw=True)
    if args.json:
        print_json(as_json(experiment, result=True))
    return _status(experiment)


def config_of(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Return the configuration of the experiment, but for the options of --config."""
    return {
        "name": args.name or _name(command),
        "entrypoint": command,
        "searcher": {"name": "single", "metric": "loss"},
        "max_restarts": args.max_restarts,
        "resources": {"slots_per_trial": args.slots},
        "labels": ["det-core run"],
    }


def _name(command: list[str]) -> str:
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return os.path.basename((scripts or command)[0])


def _status(experiment: Experiment) -> int:
    """The exit status of the script's last run, as a shell tells it: 128 and the number of the signal that ended it."""
    if experiment.state == "CANCELED":
        note(f"experiment {experiment.id} was canceled")
        return CANCELED
    if experiment.state == "COMPLETED":
        return 0
    from det_core.cli.experiment._told import first_line

    trials = experiment.trials()
    trial = trials[-1].refresh() if trials else None  # in a list they are without their exit statuses
    why = first_line((trial.error if trial is not None else None) or experiment.error or "")
    error(f"experiment {experiment.id} ended in {experiment.state}" + (f": {why}" if why else ""))
    return (trial.exit_status if trial is not None else None) or FAILED
