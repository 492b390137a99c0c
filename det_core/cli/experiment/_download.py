"""``det-core experiment download-checkpoint``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._download import download
from det_core.cli._session import find, on_master, trial_id

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

_EXAMPLES = """\
examples:
  det-core experiment download-checkpoint 3 model                    the best one
  det-core experiment download-checkpoint 3 model --trial 12         the newest one of a trial
  det-core experiment download-checkpoint 3 model --checkpoint 3f2a  one by the beginning of its id

The best checkpoint is the one with the best value of the searched metric; where none has one, the newest. It is read
from where the trials have put it, with the keys of this machine, and compared with its manifest."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("DIR", help="the folder to copy into; made if need be")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--trial", type=trial_id, metavar="TRIAL", help="the newest checkpoint of this trial")
    which.add_argument("--checkpoint", metavar="ID", help="a checkpoint's id, or the beginning of one")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Download one checkpoint of an experiment."""
    from det_core.client._fetched import opened

    experiment = find(master, args.EXPERIMENT)
    storage_id = args.checkpoint if args.trial is None else _newest_of(experiment, args.trial)
    with opened(experiment, storage_id) as checkpoint:
        return download(checkpoint, args)


def _newest_of(experiment: Experiment, trial: int) -> str:
    from det_core.errors import CheckpointNotFound

    for checkpoint in experiment.checkpoints():
        if checkpoint["state"] == "COMPLETED" and checkpoint["training"].get("trialId") == trial:
            return str(checkpoint["uuid"])
    raise CheckpointNotFound(f"trial {trial} has no checkpoint in experiment {experiment.id}")
