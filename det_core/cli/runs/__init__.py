"""``det-core runs``: what was recorded here."""

from __future__ import annotations

import argparse

from det_core.cli.runs import _export, _list, _rm, _show

__all__ = ["configure"]

_RUN = "a run's id, the beginning of one, or `latest`"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _list.configure(_command(commands, "list", "the runs, newest first"))
    _show.configure(_with_run(_command(commands, "show", "one run: state, metrics, checkpoints, how to resume it")))
    _export.configure(_with_run(_command(commands, "export", "a run's metrics as csv, jsonl or parquet")))
    _rm.configure(_command(commands, "rm", "delete runs: metrics, checkpoints and TensorBoard files, in every storage"))


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", metavar="DIR", help="where runs are kept (default: DET_CORE_HOME, else the user data folder)"
    )
    return parser


def _with_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("RUN", help=_RUN)
    return parser
