"""Per-rank results of a job: root cause, exit status, summary."""

from __future__ import annotations

import math
import re
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from det_core._standalone.stop_signals import STOP_SIGNALS

_PEER_LOST = re.compile(rb"PeerLost: rank (\d+) ")


@dataclass
class RankOutcome:
    """Result of one rank, of this node or as another launcher reported it; or of a whole node that was lost."""

    rank: int | None
    """Number of the rank; None for a node."""
    pid: int = 0
    """Process ID of the script, which leads its session and its group."""
    status: int | None = None
    """Exit status, or minus the signal that killed the script; None while it runs."""
    description: str = ""
    """Cause in words, where the status does not show it."""
    host: str = field(default_factory=socket.gethostname)
    node: int = 0
    """Number of the node."""
    ended: float = math.inf
    """Moment on this node's monotonic clock at which it ended, or the report arrived."""
    tail: bytes = b""
    """Last bytes of its output; empty for a rank of another node, whose launcher shows them."""
    peer: int | None = None
    """Rank that it reports as lost, if it ended of PeerLost."""
    lost: int = 0
    """Bytes of its output that could not be written."""

    def to_message(self) -> dict[str, Any]:
        """Return the fields that other launchers receive."""
        message = {name: getattr(self, name) for name in ("rank", "pid", "status", "host", "node", "peer")}
        return {**message, "words": self.description}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> RankOutcome:
        """Return the outcome that another launcher sent."""
        description = message.pop("words")
        return cls(**message, description=description)

    @property
    def name(self) -> str:
        """Rank with its process and host, so that a person can find it."""
        if self.rank is None:
            return f"node {self.node} ({self.host})"
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    @property
    def ending(self) -> str:
        """Cause, as it may follow "failed first"."""
        if self.description:
            return self.description
        if self.status is None:
            return "did not end"
        if self.status < 0:
            return f"killed by {signal_name(-self.status)}"
        return f"with status {self.status}"

    @property
    def failure(self) -> str:
        """Cause, as the predicate of a sentence."""
        if self.description or self.status is None:
            return self.ending
        verb = "was" if self.status < 0 else "failed"
        if self.peer is None:
            return f"{verb} {self.ending}"
        return f"{verb} {self.ending}, as it lost rank {self.peer}"


def failures(ranks: list[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that did not end with status 0: the root cause first, the others in the order of their ends."""
    failed = sorted((rank for rank in ranks if rank.status != 0), key=lambda rank: rank.ended)
    cause = _root_cause(failed)
    return sorted(failed, key=lambda rank: rank is not cause)


def _root_cause(failed: list[RankOutcome]) -> RankOutcome | None:
    """Return the rank that failed first, by the order of the ends and by what PeerLost reports."""
    by_number = {rank.rank: rank for rank in failed if rank.rank is not None}
    node = next((rank for rank in failed if rank.rank is None), None)
    cause = next(iter(failed), None)
    seen: list[RankOutcome] = []
    # A rank that raises notifies its peers before its process has ended, so they may end before it does.
    while cause is not None and cause.peer is not None and cause not in seen:
        seen.append(cause)
        cause = by_number.get(cause.peer) or node or cause
    return cause


def lost_peer(tail: bytes) -> int | None:
    """Return the rank that the last PeerLost in a rank's output reports, None without one."""
    peers = _PEER_LOST.findall(tail)
    if not peers:
        return None
    return int(peers[-1])


def exit_status(ranks: list[RankOutcome]) -> int:
    """Return 0 if every rank ended with 0, or else a shell's status of the root cause."""
    failed = failures(ranks)
    if not failed:
        return 0
    return shell_status(failed[0].status)


def shell_status(status: int | None) -> int:
    """Return the status that a shell reports: 128 and the signal if one killed the process."""
    if status is None:
        return 128 + signal.SIGKILL
    if status < 0:
        return 128 - status
    return status


def summary(ranks: list[RankOutcome], tail: int, stop: int = 0, node: int = 0) -> list[tuple[str, bytes]]:
    """Return the notices at the end of a job, each with the lines of output to show below it.

    Args:
        ranks: all outcomes that are known.
        tail: number of last lines of the root cause to show.
        stop: first signal that was forwarded to end the job; 0 without one.
        node: number of this node. Other nodes' ranks appear only as the root cause.
    """
    notices: list[tuple[str, bytes]] = []
    failed = [rank for index, rank in enumerate(failures(ranks)) if not index or rank.rank is None or rank.node == node]
    stopped = [rank for rank in failed if stop and rank.status == -stop]
    if stopped:
        notices.append((_describe_stopped(stopped, stop), b""))
    for rank in failed:
        if rank in stopped:
            continue
        lines = b""
        text = f"{rank.name} {rank.failure}"
        if rank is failed[0] and rank.rank is not None:
            text = f"{rank.name} failed first, {rank.ending}"
            if tail:
                lines = b"".join(rank.tail.splitlines(keepends=True)[-tail:])
        if lines:
            text += "; its last lines:"
        notices.append((text, lines))
    for rank in ranks:
        if rank.lost:
            notices.append((f"rank {rank.rank}: {rank.lost} bytes of its output could not be written", b""))
    return notices


def _describe_stopped(stopped: list[RankOutcome], signum: int) -> str:
    numbers = ", ".join(str(number) for number in sorted(rank.rank or 0 for rank in stopped))
    text = f"rank {numbers} ended by {signal_name(signum)}"
    if len(stopped) > 1:
        text = f"ranks {numbers} ended by {signal_name(signum)}"
    if signum in STOP_SIGNALS:
        text += ", which has no handler before the first should_preempt() call"
    return text


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 rank`` or ``2 ranks``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def signal_name(signum: int) -> str:
    """Return a name such as ``SIGTERM``; the number where a signal has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
