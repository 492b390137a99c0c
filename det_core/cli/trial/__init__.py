"""``det-core trial``: look at single trials."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from det_core.cli._session import ABOUT_MASTERS, experiment_id, master_options, trial_id
from det_core.cli.trial import _describe, _kill, _list, _logs, _metrics

__all__ = ["configure"]

_EXAMPLES = """\
examples:
  det-core trial list 3                      the trials of experiment 3, the best first
  det-core trial describe 12
  det-core trial logs 12 -f
  det-core trial metrics 12 --group validation --csv > validation.csv
  det-core t kill 12                         `t` is short for `trial`
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    parser.epilog = f"{_EXAMPLES}\n{ABOUT_MASTERS}"
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, declare: Callable[[argparse.ArgumentParser], None]) -> None:
        command = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == "list":
            command.add_argument("EXPERIMENT", type=experiment_id, help="an experiment's number, or `latest`")
        else:
            command.add_argument("TRIAL", type=trial_id, help="a trial's number")
        declare(command)
        master_options(command)

    add("list", "the trials of an experiment, the best first", _list.configure)
    add("describe", "one trial: its state, hyperparameters, validations and checkpoints", _describe.configure)
    add("logs", "what it has printed", _logs.configure)
    add("metrics", "what it has reported, as a table", _metrics.configure)
    add("kill", "kill it for good; the search goes on without it", _kill.configure)
