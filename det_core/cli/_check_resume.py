"""``det-core check-resume``: whether a training script resumes exactly."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from det_core.cli._say import error, note, print_json
from det_core.cli._signals import interrupted_by_sigterm
from det_core.cli._status import DONE, FAILED, NOT_UNDERSTOOD

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES
    parser.usage = "det-core check-resume [options] [--] COMMAND …"
    parser.add_argument(
        "--at", type=int, metavar="STEP",
        help="stop and kill after the report of this step; several ranks may agree to stop a step later (default: two "
        "fifths; the kill between two checkpoints)",
    )  # fmt: skip
    parser.add_argument(
        "--kill", action="store_true", help="leave out the stop, for a script that never calls should_preempt()"
    )
    parser.add_argument(
        "--rtol", type=float, default=0.0, metavar="R", help="relative tolerance of numbers (default: 0, bit for bit)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the homes of the trainings in this new folder")
    parser.add_argument("--json", action="store_true", help="print an object")
    parser.add_argument("COMMAND", nargs=argparse.REMAINDER, help="the command, and its arguments")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Check a command."""
    from det_core.check_resume import as_json, as_markdown, check_resume

    command = args.COMMAND[1:] if args.COMMAND[:1] == ["--"] else args.COMMAND
    if not command:
        error("there is no command to check: det-core check-resume -- python train.py")
        return NOT_UNDERSTOOD
    if args.keep and os.path.exists(args.keep):
        error(f"--keep {args.keep}: expected a folder that does not exist yet")
        return NOT_UNDERSTOOD
    experiment = None
    if Path(command[0]).name == "det-core":
        from det_core.cli._check_trial import read_experiment

        if (experiment := read_experiment(command[1:])) is None:
            return NOT_UNDERSTOOD
    folder = Path(args.keep).absolute() if args.keep else Path(tempfile.mkdtemp(prefix="det_core-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with interrupted_by_sigterm():
            report = check_resume(
                command, folder, experiment=experiment, keep=bool(args.keep), at=args.at, kill_only=args.kill,
                rtol=args.rtol, on_progress=_Progress(),
            )  # fmt: skip
    except BaseException:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if args.json:
        print_json(as_json(report))
    else:
        print(as_markdown(report))
    if report.folder is not None:
        note(f"the trainings are in {report.folder}; to remove them: rm -r {report.folder}")
    return DONE if report.is_equal else FAILED


class _Progress:
    """Progress on stderr: each training, and on a terminal its steps."""

    def __init__(self) -> None:
        self._title = ""

    def __call__(self, text: str) -> None:
        title = text.partition(": ")[0]
        if title != self._title or sys.stderr.isatty():
            self._title = title
            note(text)
