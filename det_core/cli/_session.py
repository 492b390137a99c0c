"""What the commands about a master have in common: the options that say which, and the ids that they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from det_core.client import Experiment, Master
    from det_core.client._address import Address

LATEST = "latest"
ABOUT_MASTERS = """\
The master is the one at --master, else in DET_MASTER, else the embedded one of DET_CORE_HOME, which is started when it
is needed. One at another address wants its user's token: set DET_USER_TOKEN."""


def master_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which master is meant."""
    parser.add_argument(
        "--master", metavar="URL", help="the master's address (default: DET_MASTER, else an embedded one)"
    )
    parser.add_argument(
        "--home", metavar="DIR", help="the home folder of the embedded master (default: DET_CORE_HOME, else user data)"
    )


def on_master(command: Callable[[argparse.Namespace, Master], int]) -> Callable[[argparse.Namespace], int]:
    """Have ``command`` called with a session with the master that is meant."""

    def run(args: argparse.Namespace) -> int:
        with session(args) as master:
            return command(args, master)

    return run


def session(args: argparse.Namespace) -> Master:
    """A session with the master that ``--master`` and ``--home`` name; starts the embedded one if need be."""
    from det_core.client._master import Master

    return Master(reached(args))


def reached(args: argparse.Namespace) -> Address:
    """The address of the master that ``--master`` and ``--home`` name; starts the embedded one if need be."""
    from dataclasses import replace

    from det_core.cli._say import noted_if_slow
    from det_core.client._address import reach

    with noted_if_slow("reaching the master …"):
        address = reach(args.master, home=args.home)
    return replace(address, source="--master") if args.master else address


def experiment_id(text: str) -> int | str:
    """The type of an argument that names an experiment."""
    return LATEST if text == LATEST else _number(text, "an experiment", "`det-core experiment list`")


def trial_id(text: str) -> int:
    """The type of an argument that names a trial."""
    return _number(text, "a trial", "`det-core trial list EXPERIMENT`")


def find(master: Master, given: int | str) -> Experiment:
    """The experiment that an argument names."""
    from det_core.client._experiment import Experiment
    from det_core.errors import UnknownToMaster

    if given != LATEST:
        try:
            return Experiment(master, master.get(f"experiments/{given}")["experiment"])
        except UnknownToMaster as e:
            raise UnknownToMaster(f"{e}; `det-core experiment list` shows those there are", e.status) from None
    newest = master.get("experiments", sortBy="SORT_BY_START_TIME", orderBy="ORDER_BY_DESC", limit=1)["experiments"]
    if not newest:
        raise UnknownToMaster(f"the master at {master.url} has no experiments yet", 404)
    return Experiment(master, newest[0])


def command_for(args: argparse.Namespace, *words: object) -> str:
    """A command to type, about the same master."""
    import shlex

    more = ["--master", args.master] if args.master else ["--home", args.home] if args.home else []
    return shlex.join(["det-core", *(str(word) for word in words), *more])


def _number(text: str, what: str, shown: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of {what}; {shown} shows them")
    return int(text)
