"""What is known of each rank, and what it comes to in the end. No processes here, only facts about them."""

from __future__ import annotations

import re
import signal
import socket as _socket
from dataclasses import dataclass

from ._signals import name


@dataclass
class Rank:
    """One rank of one attempt, as its wrapper tells it."""

    rank: int
    wrapper: int
    """Process id of the wrapper."""
    attempt: int = 0
    script: int = 0
    """Process id of the script, which leads its process group; 0 before it was started."""
    status: int | None = None
    """Exit status, or minus the signal that killed it; None while it runs."""
    ended: float = float("inf")
    """When it ended, on the monotonic clock."""
    tail: bytes = b""
    lost: int = 0
    """Bytes of output that could not be written."""
    host: str = ""
    """The name of its machine, if that is another one than the launcher's; its process ids are that machine's."""
    wrapper_died: bool = False
    overdue: bool = False
    """Whether it was the launcher that killed it, after the grace."""


@dataclass
class Outcome:
    """What a job came to, besides its ranks."""

    expected: int = 0
    """How many ranks the agent was to start on this machine; 0 if it did not come so far."""
    stop: int = 0
    """The first signal that was passed on to end the job; 0 if there was none."""
    agent_error: str = ""
    """Why the framework's agent failed, if the reason is its own."""
    agent_failed_at: float = float("inf")


def exit_status(ranks: list[Rank], outcome: Outcome) -> int:
    """The launcher's exit status: 0 if every rank ended with 0, else the first failure's."""
    failed = failures(ranks)
    if _failed_before_agent(failed, outcome):
        return shell_status(failed[0].status)
    all_well = not failed and len(ranks) >= max(1, outcome.expected)
    if all_well and (outcome.stop or all(r.ended <= outcome.agent_failed_at for r in ranks)):
        return 0
    if outcome.stop and len(ranks) < max(1, outcome.expected):
        return 128 + outcome.stop
    if outcome.agent_error or len(ranks) < max(1, outcome.expected):
        return 1
    return shell_status(failed[0].status)


def failures(ranks: list[Rank]) -> list[Rank]:
    """The ranks that did not end with status 0, the first to end first.

    But before a rank that ended because it had lost another one stands that other one: a rank that raises tells its
    peers before it has ended itself.
    """
    failed = sorted((r for r in ranks if r.status != 0), key=lambda r: r.ended)
    lost = _LOST.findall(failed[0].tail) if failed else []
    return sorted(failed, key=lambda r: r.rank != int(lost[-1])) if lost else failed


_LOST = re.compile(rb"PeerLost: rank (\d+) ")


def _failed_before_agent(failed: list[Rank], outcome: Outcome) -> bool:
    return any(r.ended <= outcome.agent_failed_at for r in failed)


def shell_status(status: int | None) -> int:
    """As a shell would give it: 128 and the signal for what a signal killed."""
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def summary(ranks: list[Rank], outcome: Outcome, tail: int) -> list[tuple[str, bytes]]:
    """What to say at the end: notices, each with the lines to show below it."""
    said: list[tuple[str, bytes]] = []
    failed = failures(ranks)
    agent_first = bool(outcome.agent_error) and not _failed_before_agent(failed, outcome)
    if agent_first:
        said.append((outcome.agent_error, b""))
    obeyed = [r for r in failed if outcome.stop and r.status == -outcome.stop]
    failed = [r for r in failed if r not in obeyed and not (agent_first and r.status == -signal.SIGTERM)]
    if obeyed:
        said.append((f"{_ranks(obeyed)} ended by {name(outcome.stop)}", b""))
    for place, rank in enumerate(failed):
        first = place == 0 and not agent_first
        lines = rank.tail if first and tail else b""
        where = f"pid {rank.script}, host {rank.host or _socket.gethostname()}"
        text = f"rank {rank.rank} ({where}) {'failed first, ' if first else ''}"
        text += ending(rank)
        said.append((f"{text}; its last lines:" if lines else text, lines))
    said += [(f"rank {r.rank}: {r.lost} bytes of its output could not be written", b"") for r in ranks if r.lost]
    return said


def ending(rank: Rank) -> str:
    """How a rank ended, in words."""
    if rank.wrapper_died and rank.host:
        return "was lost: its wrapper, or the connection to its machine, has died"
    if rank.wrapper_died:
        return "was killed, because its wrapper had died"
    if rank.overdue:
        return "did not end within the grace and was killed by the launcher"
    if rank.status is None:
        return "did not end"
    if rank.status < 0:
        return f"killed by {name(-rank.status)}"
    return f"with status {rank.status}"


def _ranks(ranks: list[Rank]) -> str:
    numbers = ", ".join(str(r.rank) for r in sorted(ranks, key=lambda r: r.rank))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
