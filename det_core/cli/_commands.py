"""The table of commands. Each one's module has ``configure(parser)`` and is imported when the command is used."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command: the module that has it, what it does, and its own commands."""

    module: str
    help: str
    subcommands: tuple[str, ...] = ()


EXPERIMENT_COMMANDS = ("describe", "logs", "wait", "pause", "activate", "cancel", "kill")
"""Those of `experiment` that take one experiment, and nothing else."""

COMMANDS = {
    "experiment": Command(
        "det_core.cli.experiment",
        "run an experiment that a file describes; watch, pause and stop experiments (short: e)",
        ("create", "list", *EXPERIMENT_COMMANDS, "continue", "download-checkpoint", "delete"),
    ),
    "trial": Command(
        "det_core.cli.trial",
        "look at single trials: logs, metrics (short: t)",
        ("describe", "kill", "list", "logs", "metrics"),
    ),
    "run": Command("det_core.cli._run", "run one script as a trial, without a file"),
    "search": Command("det_core.cli.search", "what a search will do, before it does it", ("preview",)),
    "master": Command("det_core.cli.master", "start, look at and stop a master", ("down", "status", "up")),
    "runs": Command(
        "det_core.cli.runs",
        "list, show, export and remove the runs kept here, which had no master",
        ("export", "list", "rm", "show"),
    ),
    "checkpoint": Command(
        "det_core.cli.checkpoint",
        "list, describe, download, verify and delete checkpoints of runs",
        ("describe", "download", "gc", "list", "rm", "verify"),
    ),
    "slurm": Command(
        "det_core.cli.slurm",
        "a script as a chain of Slurm jobs that goes on until its run is done",
        ("cancel", "list", "logs", "script", "submit"),
    ),
    "sync": Command("det_core.cli._sync", "bring runs that had no master to one"),
    "check-resume": Command("det_core.cli._check_resume", "check that a training script resumes exactly"),
    "skill": Command("det_core.cli._skill", "print where the texts for coding agents lie: a skill card, llms.txt"),
    "completion": Command(
        "det_core.cli._completion",
        "print a script that completes commands and ids",
        ("bash", "fish", "zsh"),
    ),
}
ALIASES = {"e": "experiment", "t": "trial"}
"""Short forms."""
