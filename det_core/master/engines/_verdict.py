"""How an allocation ended, by what is left of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._log_reader import last_lines
from det_core.master.engines._protocol import ExitReport


@dataclass(frozen=True)
class Files:
    """What the files of an allocation say. A script may have written anything into them.

    Attributes:
        exit: Content of ``exit.json``; None without one.
        began: Whether the script is known to have begun.
        last_lines: Last lines of the log.
    """

    exit: Mapping[str, Any] | None = None
    began: bool = False
    last_lines: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: AllocationFolder) -> Files:
        """Read the files of a folder."""
        return cls(folder.exit(), "script" in folder.processes(), last_lines(folder.log))


def verdict(files: Files, seen: str | None, asked: bool, now: float) -> ExitReport:
    """Return how an allocation ended whose processes are gone.

    Args:
        files: What its files say.
        seen: Why the engine could not start it; None if it could.
        asked: Whether the engine was asked to kill it, and its time was over.
        now: Time to report if the files have none, in seconds since the epoch.
    """
    facts = files.exit
    if facts is None or not _is_end(facts):
        return ExitReport(
            status=None,
            signal=None,
            killed=asked and seen is None,
            started=files.began,
            lost=seen is None and not asked,
            detail=seen or _lost(files.began),
            last_lines=files.last_lines,
            time=now,
        )
    killed = bool(facts.get("killed")) or (asked and bool(facts.get("lost")))
    return ExitReport(
        status=facts.get("status"),
        signal=facts.get("signal"),
        killed=killed,
        started=bool(facts.get("started")),
        lost=bool(facts.get("lost")) and not killed,
        detail=_detail(facts, killed),
        last_lines=files.last_lines,
        time=float(facts.get("time") or now),
    )


def never_launched(now: float) -> ExitReport:
    """Return the report of an allocation of which nothing is known."""
    return ExitReport(None, None, killed=False, started=False, lost=True, detail="it was never launched", time=now)


def _is_end(facts: Mapping[str, Any]) -> bool:
    """Return whether these are facts as a supervisor writes them."""
    status = facts.get("status")
    number = facts.get("signal")
    time = facts.get("time")
    if time is not None and (type(time) not in (int, float) or not abs(time) < 2**53):
        return False
    is_status = status is None or (type(status) is int and 0 <= status < 256)
    return is_status and (number is None or (type(number) is int and 0 < number < 256))


def _lost(began: bool) -> str:
    if began:
        return "its supervisor was killed, or the machine was started anew"
    return "the master was killed while it was being launched"


def _detail(facts: Mapping[str, Any], killed: bool) -> str:
    by = ""
    if killed:
        by = " by the master"
    if facts.get("error"):
        return str(facts["error"])
    if facts.get("signal") is not None:
        return f"the script was killed{by} ({_name(facts['signal'])})"
    if killed:
        return "the script was stopped by the master"
    return f"the script exited with status {facts.get('status')}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
