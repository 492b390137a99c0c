"""How an allocation ended, in the words of the protocol."""

from __future__ import annotations

import signal
from typing import Any

from det_core import _clock
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._protocol import ExitReport
from det_core.master.engines._tail import last_lines


def report(folder: AllocationFolder, *, asked: bool) -> ExitReport:
    """Read the end of an allocation that has one.

    Args:
        folder: its folder; without ``exit.json``, the allocation was lost.
        asked: whether this engine was asked to kill it.
    """
    began = "script" in folder.processes()
    facts = folder.exit() or {"lost": True, "started": began, "error": _lost(began)}
    killed = bool(facts.get("killed")) or (asked and bool(facts.get("lost")))
    return ExitReport(
        status=facts.get("status"),
        signal=facts.get("signal"),
        killed=killed,
        started=bool(facts.get("started")),
        lost=bool(facts.get("lost")) and not killed,
        detail=_detail(facts, killed),
        last_lines=last_lines(folder.log),
        time=float(facts.get("time") or _clock.now()),
    )


def never_launched() -> ExitReport:
    """Of an allocation of which nothing is known."""
    return ExitReport(
        None, None, killed=False, started=False, lost=True, detail="it was never launched", time=_clock.now()
    )


def _lost(began: bool) -> str:
    if began:
        return "its supervisor was killed, or the machine was started anew"
    return "the master was killed while it was being launched"


def _detail(facts: dict[str, Any], killed: bool) -> str:
    by, what = (" by the master" if killed else ""), facts.get("stage") or "script"
    what = "the script" if what == "script" else what
    if facts.get("error"):
        return str(facts["error"])
    if facts.get("signal") is not None:
        return f"{what} was killed{by} ({_name(facts['signal'])})"
    if killed:
        return f"{what} was stopped by the master"
    return f"{what} exited with status {facts.get('status')}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
