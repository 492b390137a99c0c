"""``det-core trial list``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._say import note, number, print_json, print_table
from det_core.cli._session import find, on_master

if TYPE_CHECKING:
    from det_core.client import Experiment, Master, Trial


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """List the trials."""
    from det_core.cli.experiment._told import trial_json

    experiment = find(master, args.EXPERIMENT)
    trials = ranked(experiment, experiment.trials())
    if args.json:
        print_json([trial_json(trial) for trial in trials])
    elif trials:
        print_trials(experiment, trials)
    else:
        note(f"experiment {experiment.id} has no trials yet")
    return 0


def ranked(experiment: Experiment, trials: list[Trial]) -> list[Trial]:
    """Trials with the best value first, those without one last."""
    sign = 1 if experiment.smaller_is_better else -1

    def key(trial: Trial) -> tuple[bool, float, int]:
        best = trial.best_metric
        usable = best is not None and best == best
        return (not usable, sign * best if usable and best is not None else 0.0, trial.id)

    return sorted(trials, key=key)


def print_trials(experiment: Experiment, trials: list[Trial]) -> None:
    """Trials as a table."""
    from det_core.cli.experiment._told import settings, state_of

    rows = [
        (
            str(trial.id),
            state_of(trial),
            "-" if trial.best_metric is None else number(trial.best_metric),
            str(trial.steps_completed),
            str(trial.restarts),
            settings(trial.hparams),
        )
        for trial in trials
    ]
    print_table(("TRIAL", "STATE", f"BEST {experiment.metric}".rstrip(), "STEPS", "RESTARTS", "HYPERPARAMETERS"), rows)
