"""``det-core search``: what a search will do."""

from __future__ import annotations

import argparse

from det_core.cli.search import _preview

__all__ = ["configure"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "the brackets, rungs and budget of a search, before it runs"
    _preview.configure(
        commands.add_parser(
            "preview", help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    )
