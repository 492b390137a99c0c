"""``det-core experiment``: create, watch and steer experiments."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from det_core.cli._session import ABOUT_MASTERS, experiment_id, master_options
from det_core.cli._status import MEANINGS
from det_core.cli.experiment import (
    _continue,
    _create,
    _delete,
    _describe,
    _download,
    _list,
    _logs,
    _steer,
    _wait,
)

__all__ = ["configure"]

_EXAMPLES = """\
examples:
  det-core experiment create search.yaml . --follow        run a search on the files of this folder, and watch it
  det-core experiment create search.yaml . --config searcher.max_trials=8
  det-core experiment list
  det-core experiment logs latest -f                       `latest` is the newest experiment
  det-core experiment pause 3                              its trials save and stop; `activate 3` goes on
  det-core experiment download-checkpoint 3 model          the best checkpoint, into the folder model
  det-core e wait 3 && echo it is done                     `e` is short for `experiment`
"""
_E = "an experiment's number, or `latest`"

Configure = Callable[[argparse.ArgumentParser], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    parser.epilog = f"{_EXAMPLES}\n{MEANINGS}\n\n{ABOUT_MASTERS}"
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, declare: Configure, *, one: bool = True, many: bool = False) -> None:
        command = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if many:
            command.add_argument("EXPERIMENT", nargs="+", type=experiment_id, help=f"{_E}; or several")
        elif one:
            command.add_argument("EXPERIMENT", type=experiment_id, help=_E)
        declare(command)
        master_options(command)

    add("create", "run the experiment that a file describes", _create.configure, one=False)
    add("list", "the experiments, newest first", _list.configure, one=False)
    add("describe", "one experiment: its state, its trials, its search", _describe.configure)
    add("logs", "what its trials have printed", _logs.configure)
    add("wait", "wait until it has ended", _wait.configure, many=True)
    for name, text in _steer.COMMANDS.items():
        add(name, text, _steer.configure(name), many=True)
    add("continue", "go on with an experiment that has ended", _continue.configure)
    add("download-checkpoint", "copy a checkpoint of its trials into a folder", _download.configure)
    add("delete", "delete experiments: checkpoints, metrics, TensorBoard files and logs", _delete.configure, one=False)
