"""What a job comes to: facts about its ranks, which of them failed first, the exit status, and what is said."""

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
    """A rank of this machine, or of another one as its launcher has told; or a whole machine that was lost."""

    rank: int | None
    """None: a machine."""
    pid: int = 0
    """The script's process id, which is its session's and its group's, too."""
    status: int | None = None
    """Exit status, or minus the signal that killed it; None while it runs."""
    description: str = ""
    """How it ended, where the status does not tell."""
    host: str = field(default_factory=socket.gethostname)
    node: int = 0
    """The number of its machine."""
    ended: float = math.inf
    """When it ended, or this machine heard of it, on the monotonic clock of this machine."""
    tail: bytes = b""
    """The last that it has printed. What another machine's rank has printed is shown there."""
    peer: int | None = None
    """The rank that it names as lost, if it ended of PeerLost."""
    lost: int = 0
    """Bytes of its output that could not be written."""

    def to_message(self) -> dict[str, Any]:
        """What launchers of other machines hear of it."""
        message = {name: getattr(self, name) for name in ("rank", "pid", "status", "host", "node", "peer")}
        return {**message, "words": self.description}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> RankOutcome:
        """Return the outcome that another launcher sent."""
        return cls(**{"description" if name == "words" else name: value for name, value in message.items()})

    @property
    def name(self) -> str:
        """The rank as a person can find it."""
        if self.rank is None:
            return f"machine {self.node} ({self.host})"
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    @property
    def ending(self) -> str:
        """How it ended, in words that may stand behind "failed first"."""
        if self.description:
            return self.description
        if self.status is None:
            return "did not end"
        return f"killed by {signal_name(-self.status)}" if self.status < 0 else f"with status {self.status}"

    @property
    def failure(self) -> str:
        """The same as the predicate of a sentence."""
        if self.description or self.status is None:
            return self.ending
        text = f"{'was' if self.status < 0 else 'failed'} {self.ending}"
        return text if self.peer is None else f"{text}, as it lost rank {self.peer}"


def failures(ranks: list[RankOutcome]) -> list[RankOutcome]:
    """The ranks that did not end with status 0, the one to blame first, the others as they ended.

    A rank that raises tells its peers before its process has ended, so that they may end before it does. Whoever ended
    of PeerLost therefore stands behind the rank which that error names, or the machine that was lost with it.
    """
    failed = sorted((rank for rank in ranks if rank.status != 0), key=lambda rank: rank.ended)
    blamed = _root_cause(failed)
    return sorted(failed, key=lambda rank: rank is not blamed)


def _root_cause(failed: list[RankOutcome]) -> RankOutcome | None:
    by_number = {rank.rank: rank for rank in failed if rank.rank is not None}
    machine = next((rank for rank in failed if rank.rank is None), None)
    blamed, seen = next(iter(failed), None), list[RankOutcome]()
    while blamed is not None and blamed.peer is not None and blamed not in seen:
        seen.append(blamed)
        blamed = by_number.get(blamed.peer) or machine or blamed
    return blamed


def lost_peer(tail: bytes) -> int | None:
    """The rank that the last PeerLost in what a rank has printed names."""
    found = _PEER_LOST.findall(tail)
    return int(found[-1]) if found else None


def exit_status(ranks: list[RankOutcome]) -> int:
    """0 if every rank ended with 0, else that of the first failure, as a shell would give it."""
    failed = failures(ranks)
    return shell_status(failed[0].status) if failed else 0


def shell_status(status: int | None) -> int:
    """As a shell gives it: 128 and the signal for what a signal has killed."""
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def summary(ranks: list[RankOutcome], tail: int, stop: int = 0, node: int = 0) -> list[tuple[str, bytes]]:
    """What to say at the end: notices, each with the lines to show below it.

    Args:
        ranks: all that is known of.
        tail: how many of the last lines of the first one that failed are shown.
        stop: the first signal that was passed on to end the job; 0 if there was none.
        node: the number of this machine. Of another one's ranks only the first failure of all is told.
    """
    said: list[tuple[str, bytes]] = []
    failed = [rank for at, rank in enumerate(failures(ranks)) if not at or rank.rank is None or rank.node == node]
    obeyed = [rank for rank in failed if stop and rank.status == -stop]
    if obeyed:
        numbers = ", ".join(str(rank.rank) for rank in sorted(obeyed, key=lambda rank: rank.rank or 0))
        text = f"{'ranks' if len(obeyed) > 1 else 'rank'} {numbers} ended by {signal_name(stop)}"
        if stop in STOP_SIGNALS:
            text += ", which nothing handled: should_preempt() does, from its first call on"
        said.append((text, b""))
    for rank in (rank for rank in failed if rank not in obeyed):
        first = rank is failed[0] and rank.rank is not None
        lines = b"".join(rank.tail.splitlines(keepends=True)[-tail:]) if first and tail else b""
        text = f"{rank.name} {f'failed first, {rank.ending}' if first else rank.failure}"
        said.append((f"{text}; its last lines:" if lines else text, lines))
    return said + [(f"rank {r.rank}: {r.lost} bytes of its output could not be written", b"") for r in ranks if r.lost]


def signal_name(signum: int) -> str:
    """``SIGTERM`` and the like; the number where it has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
