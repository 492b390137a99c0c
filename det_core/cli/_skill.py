"""``det-core skill``: where the texts for coding agents lie."""

from __future__ import annotations

import argparse
from pathlib import Path

import det_core
from det_core.cli._say import note, print_json

_EXAMPLES = """\
examples:
  det-core skill                                          the paths, a line each
  cp -r "$(det-core skill --folder)" .agents/skills/      give the skill to an agent that reads this folder

The skill card says on one page how to port a training script, in the open format for agent skills; llms.txt is an index
of the documentation."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--folder", action="store_true", help="print the skill's folder alone")
    shape.add_argument("--json", action="store_true", help="print the paths as an object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the paths."""
    package = Path(det_core.__file__).parent
    folder = (package / "skills" / "port-a-training-script").resolve()
    card = folder / "SKILL.md"
    index = (package / "llms.txt").resolve()
    if args.json:
        print_json({"skill": str(card), "llms": str(index)})
    elif args.folder:
        print(folder)
    else:
        print(card, index, sep="\n")
        note("to have a coding agent port a script, give it the first file")
    return 0
