"""``det-core checkpoint``: what is kept of runs to go on from."""

from __future__ import annotations

import argparse

from det_core.cli.checkpoint import _describe, _download, _gc, _list, _rm, _verify

__all__ = ["configure"]

_ID = "a checkpoint's id, the beginning of one, or `latest`"
_WHERE = """\
Without --storage and --run: the checkpoints of the newest run, wherever it kept them. Secrets of a cloud
store come from the environment, as its own tools read them; the record of a run holds none."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    parser.epilog = _WHERE
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _list.configure(_command(commands, "list", "the checkpoints, newest first"))
    _describe.configure(_with_id(_command(commands, "describe", "one checkpoint: its files, its metadata")))
    _download.configure(_with_id(_command(commands, "download", "copy a checkpoint into a folder, and compare it")))
    _verify.configure(_with_ids(_command(commands, "verify", "compare every byte with the manifest"), "*"))
    _rm.configure(_with_ids(_command(commands, "rm", "delete checkpoints"), "+"))
    _gc.configure(_command(commands, "gc", "delete the checkpoints that are not to be kept"))


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="a folder, a URL, or the JSON of a checkpoint_storage (default: where the run kept them)",
    )
    parser.add_argument("--run", metavar="RUN", help="only this run's: its id, the beginning of one, or `latest`")
    parser.add_argument(
        "--home", metavar="DIR", help="where runs are kept (default: DET_CORE_HOME, else the user data folder)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _with_id(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("ID", help=_ID)
    return parser


def _with_ids(parser: argparse.ArgumentParser, number: str) -> argparse.ArgumentParser:
    parser.add_argument("ID", nargs=number, help=_ID)
    return parser
