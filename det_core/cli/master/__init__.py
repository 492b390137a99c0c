"""``det-core master``: start, look at and stop a master."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from det_core.cli.master import _down, _status, _up

__all__ = ["configure"]

_EXAMPLES = """\
The embedded master of DET_CORE_HOME needs none of this: the commands start it when they need it, and it goes on until
`det-core master down`. To start it yourself is of use to say how many trials may run at a time, or to serve others:

examples:
  det-core master up --slots 4                             four slots on a machine without GPUs
  det-core master up --host 0.0.0.0 --port 8080 --token-file ~/token
                                                           for other machines: there DET_MASTER=http://HOST:8080
  det-core master status
  det-core master down                                     trials go on; the next master finds them
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``parser``; each sets ``run_command`` to what carries it out."""
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, declare: Callable[[argparse.ArgumentParser], None]) -> None:
        command = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument(
            "--home", metavar="DIR", help="where it keeps everything (default: DET_CORE_HOME, else user data)"
        )
        declare(command)

    add("up", "start the master of a home folder", _up.configure)
    add("status", "whether it runs, where, and how busy it is", _status.configure)
    add("down", "stop it; trials go on", _down.configure)
