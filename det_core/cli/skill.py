"""``det-core skill``: paths of the texts for coding agents."""

from __future__ import annotations

from pathlib import Path

import click

from det_core.cli._groups import Command
from det_core.cli._options import json_option
from det_core.cli._output import note, print_json

_EXAMPLES = """\
examples:
  det-core skill                                          the paths, a line each
  cp -r "$(det-core skill --folder)" .agents/skills/      give the skill to an agent that reads this directory

The skill card says on one page how to port a training script, in the open format for agent skills; llms.txt is an index
of the documentation."""


@click.command("skill", cls=Command, epilog=_EXAMPLES)
@click.option("--folder", "folder_only", is_flag=True, help="Print the skill's directory alone.")
@json_option
def command(folder_only: bool, as_json: bool) -> None:
    """Print the paths of the texts for coding agents: a skill card, llms.txt."""
    import det_core

    package = Path(det_core.__file__).parent
    folder = (package / "skills" / "port-a-training-script").resolve()
    card = folder / "SKILL.md"
    index = (package / "llms.txt").resolve()
    if folder_only and as_json:
        raise click.UsageError("--folder and --json exclude each other: leave out one of them")
    if as_json:
        print_json({"skill": str(card), "llms": str(index)})
    elif folder_only:
        print(folder)
    else:
        print(card, index, sep="\n")
        note("to have a coding agent port a script, give it the first file")
