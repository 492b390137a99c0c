"""``det-core check-resume``: whether a training script resumes exactly."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import ALIASES, Command
from det_core.cli._options import SCRIPT_SETTINGS, json_option, script_argument
from det_core.cli._output import INVALID, Failure, interrupted_by_sigterm, note, print_json
from det_core.cli.experiment import create, parse_config, slots_override
from det_core.cli.run import command as run_command
from det_core.cli.run import script_config

if TYPE_CHECKING:
    from det_core.check_resume._trial import ExperimentSource

_EXAMPLES = """\
examples:
  det-core check-resume -- python train.py --epochs 2
  det-core check-resume --at 150 -- python train.py --steps 400
  det-core check-resume -- python -m det_core.launch.torch_distributed --nproc-per-node 2 train.py
  det-core check-resume -- det-core run -- python train.py
  det-core check-resume --json -- python train.py > check.json

The command is run undisturbed twice, stopped and resumed, killed with kill -9 and resumed, and resumed after its end,
one after the other: let it train for seconds, with a few checkpoints. Where the record shows epochs (by validations, or
passes of a DataLoader), another training is stopped in the last batch of one. Rows, ranks, runs, the final checkpoint
and processes that are left are compared. Runs and checkpoints are kept in a temporary home, also those for which the
script names a checkpoint_storage; nothing in DET_CORE_HOME changes. What the script writes elsewhere, it writes.

`det-core run` and `det-core experiment create` are checked under a master of their own, which ends with the check: one
trial, stopped by a pause, and started again by the master after a kill.

The summary is Markdown. The exit status is 0 if all is equal, and else 1."""


def _check_keep(_ctx: click.Context, _param: click.Parameter, path: str | None) -> str | None:
    if path and os.path.exists(path):
        raise Failure(f"--keep {path}: expected a folder that does not exist yet", INVALID)
    return path


@click.command("check-resume", cls=Command, epilog=_EXAMPLES, context_settings=SCRIPT_SETTINGS)
@click.option(
    "--at",
    type=int,
    metavar="STEP",
    help="Stop and kill after the report of this step; several ranks may agree to stop a step later (default: two "
    "fifths; the kill between two checkpoints).",
)
@click.option("--kill", is_flag=True, help="Leave out the stop, for a script that never calls should_preempt().")
@click.option("--rtol", type=float, default=0.0, metavar="R", help="Relative tolerance (default: 0, bit for bit).")
@click.option("--keep", metavar="DIR", callback=_check_keep, help="Keep the homes of the trainings in this new folder.")
@json_option
@script_argument
def command(at: int | None, kill: bool, rtol: float, keep: str | None, as_json: bool, script: Sequence[str]) -> int:
    """Check that a training script resumes exactly."""
    from det_core.check_resume import as_json as report_json
    from det_core.check_resume import as_markdown, check_resume

    experiment = None
    if Path(script[0]).name == "det-core":
        experiment = read_experiment(list(script[1:]))
    folder = Path(keep).absolute() if keep else Path(tempfile.mkdtemp(prefix="det_core-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with interrupted_by_sigterm():
            report = check_resume(
                list(script),
                folder,
                experiment=experiment,
                keep=bool(keep),
                at=at,
                kill_only=kill,
                rtol=rtol,
                on_progress=_Progress(),
            )
    except BaseException:
        # An interrupted check is worth nothing, and its homes hold checkpoints.
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if as_json:
        print_json(report_json(report))
    else:
        print(as_markdown(report))
    if report.folder is not None:
        note(f"the trainings are in {report.folder}; to remove them: rm -r {report.folder}")
    return int(not report.is_equal)


class _Progress:
    """Progress on stderr: each training, and on a terminal its steps."""

    def __init__(self) -> None:
        self._title = ""

    def __call__(self, text: str) -> None:
        title = text.partition(": ")[0]
        if title != self._title or sys.stderr.isatty():
            self._title = title
            note(text)


def read_experiment(words: list[str]) -> ExperimentSource:
    """Read the experiment that a ``det-core`` command would create.

    Args:
        words: words of the command after ``det-core``.

    Raises:
        Failure: If it cannot be checked.
    """
    from det_core.check_resume._trial import ExperimentSource

    group = "".join(words[:1])
    group = ALIASES.get(group, group)
    # By the very commands, so that the check and they cannot differ in what an option means.
    root = click.get_current_context().find_root()
    if group == "run":
        options = run_command.make_context("run", words[1:], parent=root).params
    elif group == "experiment" and words[1:2] == ["create"]:
        options = create.make_context("experiment create", words[2:], parent=root).params
    else:
        text = f"`det-core {' '.join(words[:2])}` trains nothing: give the command of a training, or `det-core run`"
        raise Failure(text, INVALID)
    if options["master"] or options["home"]:
        raise Failure("check-resume starts a master of its own: leave out --master and --home", INVALID)
    overrides = list(options["config"])
    directory = "."
    if group == "run":
        config: Any = script_config(*(options[name] for name in ("name", "slots", "max_restarts", "script")))
    else:
        config = options["config_file"]
        directory = options["directory"]
        overrides += slots_override(options["slots"])
    experiment = parse_config(config, overrides)
    for warning in experiment.warnings:
        note(f"warning: {warning}")
    if (name := experiment.searcher["name"]) != "single":
        text = f"searcher.name is {name}: check-resume checks an experiment with one trial, searcher.name: single"
        raise Failure(text, INVALID)
    return ExperimentSource(experiment.data, directory)
