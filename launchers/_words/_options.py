"""The options that every launcher of ours has beside the framework's own."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

GRACE = 60.0
TAIL = 20


class UsageError(ValueError):
    """A command line that cannot be run; the message is one line that says what to change."""


class CannotStart(RuntimeError):
    """A command line that could be run, but not here and now; the message is one line that says why."""


@dataclass(frozen=True)
class Options:
    """How a launcher treats the scripts it starts."""

    grace: float = GRACE
    """Seconds that scripts get to save and exit after a signal; what still runs then is killed."""
    tail: int = TAIL
    """How many of the last lines of the first rank that failed are shown at the end."""
    verbose: bool = False
    """Whether the framework's agent writes its own messages to stderr."""


def add_options(parser: argparse.ArgumentParser, grace: float | None) -> None:
    """Add these options to ``parser``; ``grace`` is the default that ``DET_CORE_GRACE`` sets, if it does."""
    group = parser.add_argument_group("det_core's own options")
    group.add_argument(
        "--grace",
        type=_seconds,
        default=GRACE if grace is None else grace,
        metavar="SECONDS",
        help=f"how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP; what still runs then is "
        f"killed (default: DET_CORE_GRACE, else {GRACE:g})",
    )
    group.add_argument(
        "--tail",
        type=_count,
        default=TAIL,
        metavar="LINES",
        help=f"how many of the last lines of the first rank that failed to show at the end (default: {TAIL})",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="show the messages of the framework's agent too (by default only if the agent itself fails)",
    )


def read_options(namespace: argparse.Namespace) -> Options:
    """Our options out of what a parser with :func:`add_options` has read."""
    return Options(namespace.grace, namespace.tail, namespace.verbose)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, not {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of lines, 0 or more, not {text!r}")
    return int(text)
