"""``det-core experiment pause``, ``activate``, ``cancel`` and ``kill``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from det_core.cli._say import error, note, print_json
from det_core.cli._session import command_for, find, on_master
from det_core.cli._status import FAILED

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

COMMANDS = {
    "pause": "have its trials save and stop, to go on at `activate`",
    "activate": "go on after a pause",
    "cancel": "have its trials save and stop for good",
    "kill": "kill its trials for good, without letting them save",
}


_IDLE = ("cancel", "kill")
"""What there is nothing to do for in an experiment that has ended."""
_ABOUT = """\
Several experiments are steered one after the other; one that cannot be does not keep the others. What has ended cannot
be paused or activated (`continue` goes on with it); to cancel or kill it changes nothing, and is no error."""


def configure(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """What declares the options of the command ``name``."""

    def declare(parser: argparse.ArgumentParser) -> None:
        parser.epilog = _ABOUT
        parser.add_argument("--json", action="store_true", help="one object; a list of them, if several are named")
        parser.set_defaults(run_command=on_master(lambda args, master: _run(args, master, name)))

    return declare


def _run(args: argparse.Namespace, master: Master, name: str) -> int:
    from det_core.cli.experiment._told import as_json
    from det_core.errors import MasterError, MasterUnreachable

    told, failed = [], 0
    for given in dict.fromkeys(args.EXPERIMENT):
        try:
            experiment = find(master, given)
            _steer(args, experiment, name)
            told.append(as_json(experiment))
        except MasterUnreachable:
            raise
        except MasterError as e:
            failed += 1
            error(str(e))
    if args.json and told:
        print_json(told[0] if len(args.EXPERIMENT) == 1 else told)
    return FAILED if failed else 0


def _steer(args: argparse.Namespace, experiment: Experiment, name: str) -> None:
    from det_core.cli.experiment._told import state_of_all, still_saves
    from det_core.errors import MasterError

    ended = experiment.ended
    if ended and name in _IDLE:
        note(f"experiment {experiment.id} had ended already")
    try:
        {
            "pause": experiment.pause,
            "activate": experiment.activate,
            "cancel": experiment.cancel,
            "kill": experiment.kill,
        }[name]()
    except MasterError as e:
        if not ended:
            raise
        hint = command_for(args, "experiment", "continue", experiment.id)
        raise MasterError(f"{e}; to go on with it: {hint}", e.status) from None
    if args.json:
        return
    print(f"experiment {experiment.id} ({experiment.name}): {state_of_all(experiment)}")
    if saving := still_saves(experiment):
        note(saving)
