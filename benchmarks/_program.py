"""What every benchmark takes on its command line."""

from __future__ import annotations

import argparse
import sys
from typing import TypeVar

T = TypeVar("T")
QUICK = "--quick" in sys.argv[1:]
"""Whether a benchmark is only to show that it runs: with the least of everything, no bound, and no peer that needs an
environment of its own. Known when a module is imported, as sizes stand in constants."""


def quick(full: T, least: T) -> T:
    """``full``, or with ``--quick`` ``least``."""
    return least if QUICK else full


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser, to which a benchmark may add options of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only show that it runs; the figures mean nothing")
    return parser


def status(missed: int) -> int:
    """The exit status of a benchmark that has missed so many bounds."""
    return 0 if QUICK else int(missed)
