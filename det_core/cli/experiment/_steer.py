"""``det-core experiment pause``, ``activate``, ``cancel`` and ``kill``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from det_core.cli._say import note, print_json
from det_core.cli._session import find, on_master

if TYPE_CHECKING:
    from det_core.client import Master

COMMANDS = {
    "pause": "have its trials save and stop, to go on at `activate`",
    "activate": "go on after a pause",
    "cancel": "have its trials save and stop for good",
    "kill": "kill its trials for good, without letting them save",
}


def configure(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """What declares the options of the command ``name``."""

    def declare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one object")
        parser.set_defaults(run_command=on_master(lambda args, master: _run(args, master, name)))

    return declare


def _run(args: argparse.Namespace, master: Master, name: str) -> int:
    from det_core.cli.experiment._told import as_json, state_of_all, still_saves

    experiment = find(master, args.EXPERIMENT)
    {"pause": experiment.pause, "activate": experiment.activate, "cancel": experiment.cancel, "kill": experiment.kill}[
        name
    ]()
    if args.json:
        print_json(as_json(experiment))
    else:
        print(f"experiment {experiment.id} ({experiment.name}): {state_of_all(experiment)}")
        if saving := still_saves(experiment):
            note(saving)
    return 0
