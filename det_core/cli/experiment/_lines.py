"""Log lines, for a person or a program."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.client import Trial

_PLAIN = ("", "UNSPECIFIED", "INFO")
"""Levels that are not worth a word."""


def text_of(line: Mapping[str, Any]) -> str:
    """A line as it was printed, with its rank and its level before it."""
    rank, level = line.get("rank_id"), str(line.get("level", "")).removeprefix("LOG_LEVEL_")
    before = "" if rank is None else f"[rank={rank}] "
    return before + ("" if level in _PLAIN else f"{level}: ") + str(line["log"]).rstrip("\n")


def head_of(trial: Trial) -> str:
    """What stands before each line of a trial among those of others."""
    return f"[trial {trial.id}] "


def print_line(trial: Trial, line: Mapping[str, Any], *, json: bool = False, head: bool = True) -> None:
    """A line on stdout.

    Args:
        trial: whose it is.
        line: as the master tells it.
        json: as an object.
        head: with the trial's number.
    """
    if json:
        import orjson

        told = {
            "trial": trial.id,
            "rank": line.get("rank_id"),
            "time": line.get("timestamp"),
            "level": str(line.get("level", "")).removeprefix("LOG_LEVEL_"),
            "stream": line.get("stdtype"),
            "text": str(line["log"]).rstrip("\n"),
        }
        print(orjson.dumps(told).decode(), flush=True)
    else:
        print((head_of(trial) if head else "") + text_of(line), flush=True)


def print_raw(line: Mapping[str, Any]) -> None:
    """A line where the script has printed it: on stdout or stderr."""
    print(text_of(line), file=sys.stderr if line.get("stdtype") == "stderr" else sys.stdout, flush=True)
