"""Groups of commands: imported when they are used, with hints for a misspelt name."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from det_core._notices import write_quietly

COMMANDS = {
    "experiment": ("experiment", "run an experiment that a file describes; watch, pause, stop them (short: e)"),
    "trial": ("trial", "look at single trials: logs, metrics (short: t)"),
    "run": ("run", "run one script as a trial, without a file"),
    "search": ("search", "preview a search before it runs"),
    "master": ("master", "start, look at and stop a master"),
    "runs": ("runs", "list, show, export and remove the runs kept here, which had no master"),
    "checkpoint": ("checkpoint", "list, describe, download, verify and delete checkpoints of runs"),
    "slurm": ("slurm", "submit a script as a chain of Slurm jobs that goes on until its run is done"),
    "sync": ("runs:sync", "send runs that had no master to one"),
    "check-resume": ("check_resume", "check that a training script resumes exactly"),
    "skill": ("completion:skill", "print the paths of the texts for coding agents: a skill card, llms.txt"),
    "completion": ("completion", "print a script that completes commands and IDs"),
}
"""Commands of ``det-core``: module, with their name there unless that is ``command``, and line of help."""
ALIASES = {"e": "experiment", "t": "trial"}
"""Short names of groups."""


class Command(click.Command):
    """A command whose epilog is printed as it is."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help, which succeeds also where its text cannot be written."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _print_help
        return option

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog without wrapping its lines."""
        if self.epilog:
            formatter.write(f"\n{self.epilog.strip()}\n")

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help, whole: lists wrap it."""
        return super().get_short_help_str(1000)


def _print_help(ctx: click.Context, _param: click.Parameter | None = None, is_given: bool = True) -> None:
    if is_given and not ctx.resilient_parsing:
        write_quietly(f"{ctx.get_help()}\n", sys.stdout)
        ctx.exit()


class Group(Command, click.Group):
    """A group that shows its help if it is called alone, and suggests the command that was probably meant."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help where arguments are missing; click would exit with status 2."""
        if not args:
            _print_help(ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that the first argument names, or fail with a hint."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no command {name!r}: {self.hint(ctx, name, args[1:])}")
        return super().resolve_command(ctx, args)

    def hint(self, ctx: click.Context, name: str, rest: list[str]) -> str:
        """Return a hint for a name that no command has."""
        from difflib import get_close_matches

        names = self.list_commands(ctx)
        matches = get_close_matches(name, names, n=1)
        if matches:
            return f"did you mean `{' '.join([ctx.command_path, matches[0], *rest])}`?"
        return f"there are {', '.join(names)}"


class RootGroup(Group):
    """All commands of ``det-core``."""

    def __init__(self, **attributes: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        super().__init__(**attributes, context_settings=settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)  # not sorted: the most used first

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"det_core.cli.{module}"), attribute or "command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that the first argument names, also by its short name."""
        return super().resolve_command(ctx, [ALIASES.get(args[0], args[0]), *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def hint(self, ctx: click.Context, name: str, rest: list[str]) -> str:
        """Return a hint, also for a command of a group that was typed without its group."""
        if within := groups_with(ctx, name):
            return f"did you mean {' or '.join(f'`det-core {group} {name}`' for group in within)}?"
        return super().hint(ctx, name, rest)


def groups_with(ctx: click.Context, name: str) -> list[str]:
    """Return the groups that have a command of this name."""
    # Imports every command: a misspelt one may take the time.
    root = ctx.find_root().command
    assert isinstance(root, RootGroup)
    groups = {group: root.get_command(ctx, group) for group in COMMANDS}
    return [group for group, command in groups.items() if isinstance(command, Group) and name in command.commands]
