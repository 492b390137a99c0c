"""Verdicts: how an allocation ended, by what is left of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._logs import last_lines
from det_core.master.engines._protocol import ExitReport
from det_core.master.scheduler import Cause

_WARNED = (Cause.TAKEN, Cause.TIME, Cause.MEMORY)
"""Causes of which a script may have been warned, so that it ended before they did."""


class Seen(NamedTuple):
    """An end, or a start that failed, as an engine saw it."""

    cause: Cause
    detail: str


@dataclass(frozen=True)
class Files:
    """Content of the files of an allocation. A script may have written anything into them.

    Attributes:
        exit: Content of the ``exit.json`` that counts; None without one.
        began: Whether the script is known to have begun.
        last_lines: Last lines of the log.
    """

    exit: Mapping[str, Any] | None = None
    began: bool = False
    last_lines: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: AllocationFolder, nodes: int = 1) -> Files:
        """Read the files of an allocation on so many nodes; an end counts as soon as it was delivered."""
        parts = [folder.of_node(node) for node in range(nodes)]
        exits = [part.exit() or part.delivery().get("exit") for part in parts]
        node = _node_that_counts(exits)
        began = any("script" in part.processes() for part in parts)
        return cls(exits[node], began, last_lines(folder.log, node=node))


def verdict(files: Files, seen: Seen | None, asked: bool, now: float) -> ExitReport:
    """Return how an allocation ended whose processes are gone.

    Args:
        files: Content of its files. What they say of the script's end holds, whatever the engine saw.
        seen: What the engine saw; None if that is nothing.
        asked: Whether the engine was asked to kill it, and its time was over.
        now: Time to report if the files have none, in seconds since the epoch.
    """
    facts = files.exit
    if facts is None or not _is_end(facts):
        end = _missing_end(files.began, seen, asked)
        return ExitReport(None, None, end.cause, end.detail, files.last_lines, now)
    status = facts.get("status")
    cause = _cause(facts, seen)
    detail = _detail(facts, cause)
    if seen is not None and seen.cause in _WARNED:
        detail = f"{detail}: {seen.detail}"
    lost = facts.get("lost_bytes")
    if type(lost) is int and lost > 0:
        detail = f"{detail}; {lost} bytes of its output are lost, as the disk was full"
    time = float(facts.get("time") or now)
    return ExitReport(status, facts.get("signal"), cause, detail, files.last_lines, time)


def _node_that_counts(exits: Sequence[Mapping[str, Any] | None]) -> int:
    """Return the node that failed first; if none did, one whose end is not known, or the first."""
    known = {node: facts for node, facts in enumerate(exits) if facts is not None and _is_end(facts)}
    failed = [node for node, facts in known.items() if facts.get("status") != 0]
    if failed:
        return min(failed, key=lambda node: known[node].get("time") or 0.0)
    return next((node for node in range(len(exits)) if node not in known), 0)


def _missing_end(began: bool, seen: Seen | None, asked: bool) -> Seen:
    """Return the end of an allocation that no supervisor wrote down."""
    if asked and (seen is None or seen.cause is Cause.LOST):
        return Seen(Cause.CANCELLED, "it was killed by the master")
    if seen is not None:
        return seen
    if began:
        return Seen(Cause.LOST, "its supervisor was killed, or the machine was started anew")
    return Seen(Cause.NOT_STARTED, "the master was killed while it was being launched")


def _cause(facts: Mapping[str, Any], seen: Seen | None) -> Cause:
    if facts.get("killed"):
        return Cause.CANCELLED
    if facts.get("cause") in tuple(Cause):
        return Cause(facts["cause"])
    if not facts.get("started"):
        return Cause.NOT_STARTED
    if seen is not None and seen.cause in _WARNED and facts.get("status") != 0:
        return seen.cause
    return Cause.NONE


def _is_end(facts: Mapping[str, Any]) -> bool:
    """Return whether these are facts as a supervisor writes them."""
    status = facts.get("status")
    number = facts.get("signal")
    time = facts.get("time")
    if time is not None and (type(time) not in (int, float) or not abs(time) < 2**53):
        return False
    is_status = status is None or (type(status) is int and 0 <= status < 256)
    return is_status and (number is None or (type(number) is int and 0 < number < 256))


def _detail(facts: Mapping[str, Any], cause: Cause) -> str:
    if facts.get("error"):
        return str(facts["error"])
    signal = facts.get("signal")
    if cause is Cause.CANCELLED:
        if signal is not None:
            return f"the script was killed by the master ({_signal_name(signal)})"
        return "the script was stopped by the master"
    if signal is not None:
        return f"the script was killed ({_signal_name(signal)})"
    return f"the script exited with status {facts.get('status')}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
