"""``det-core run``: one script as a trial, without a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import Command
from det_core.cli._options import (
    ABOUT_MASTERS,
    COUNT,
    SCRIPT_SETTINGS,
    config_option,
    json_option,
    on_master,
    script_argument,
)
from det_core.cli._output import CANCELED, FAILED, error, note, print_json
from det_core.cli._views import experiment_json, first_line, line_text
from det_core.cli.experiment import print_started, submit

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

_EXAMPLES = f"""\
examples:
  det-core run -- python train.py --lr 0.1
  det-core run --slots 2 -- python -m det_core.launch.torch_distributed train.py
  det-core run --name first-try --max-restarts 3 --detach -- python train.py

The command runs in a copy of the current directory, without what .detignore names (patterns as in .gitignore), .git and
virtual environments; what it prints is printed here, and its exit status is that of this command. Ctrl-C (or SIGTERM)
stops watching, not the script. `python` is the Python that the master was started with.

{ABOUT_MASTERS}"""


@click.command("run", cls=Command, epilog=_EXAMPLES, context_settings=SCRIPT_SETTINGS)
@click.option("--name", help="Name of the experiment (default: that of the script).")
@click.option("--slots", type=COUNT, default=1, metavar="N", help="Slots (GPUs) of the script (default: 1).")
@click.option("--max-restarts", type=COUNT, default=0, metavar="N", help="Restarts after failures (default: 0).")
@config_option
@click.option("--detach", "-d", is_flag=True, help="Do not watch it: print its number, and end.")
@json_option
@script_argument
@on_master
def command(
    master: Master,
    name: str | None,
    slots: int,
    max_restarts: int,
    config: Sequence[str],
    detach: bool,
    as_json: bool,
    script: Sequence[str],
) -> int:
    """Run a command as the one trial of an experiment."""
    from det_core.cli._follow import follow

    experiment = submit(master, script_config(name, slots, max_restarts, script), ".", list(config))
    if detach:
        print_started(experiment, as_json)
        return 0
    follow(experiment, None if as_json else _print_line)
    if as_json:
        print_json(experiment_json(experiment, result=True))
    return _exit_status(experiment)


def _print_line(line: Mapping[str, Any]) -> None:
    """Print a line as if the script ran here."""
    stream = sys.stderr if line.get("stdtype") == "stderr" else sys.stdout
    print(line_text(line), file=stream, flush=True)


def script_config(name: str | None, slots: int, max_restarts: int, script: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of an experiment that runs one command."""
    # Of `torchrun --nproc-per-node 2 train.py` the script, not the launcher, is what a person looks for.
    scripts = [word for word in script if word.endswith((".py", ".sh"))]
    return {
        "name": name or os.path.basename((scripts or script)[0]),
        "entrypoint": list(script),
        "searcher": {"name": "single", "metric": "loss"},
        "max_restarts": max_restarts,
        "resources": {"slots_per_trial": slots},
    }


def _exit_status(experiment: Experiment) -> int:
    """Return the exit status of the script's last run, as a shell does: 128 and the signal that ended it."""
    if experiment.state == "CANCELED":
        note(f"experiment {experiment.id} was canceled")
        return CANCELED
    if experiment.state == "COMPLETED":
        return 0
    cause = experiment.error
    status = None
    if trials := experiment.trials():
        trial = trials[-1].refresh()  # trials in a list lack their exit statuses
        cause = trial.error or cause
        status = trial.exit_status
    text = f"experiment {experiment.id} ended in {experiment.state}"
    error(": ".join(filter(None, [text, first_line(cause or "")])))
    return status or FAILED  # a script may exit with 0 and fail, as before its operation is done
