"""The table of commands. Each one's module has ``configure(parser)`` and is imported when the command is used."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command: the module that has it, what it does, and its own commands."""

    module: str
    help: str
    subcommands: tuple[str, ...] = ()


COMMANDS = {
    "checkpoint": Command(
        "det_core.cli.checkpoint",
        "list, describe, download, verify and delete checkpoints",
        ("describe", "download", "gc", "list", "rm", "verify"),
    ),
    "completion": Command(
        "det_core.cli._completion",
        "print a script that completes commands and ids",
        ("bash", "fish", "zsh"),
    ),
    "runs": Command(
        "det_core.cli.runs", "list, show, export and remove the runs kept here", ("export", "list", "rm", "show")
    ),
}
