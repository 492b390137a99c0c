"""Membership of a job: the peers of a rank, the reason for which all of them abort, and the rule for waiting.

On one node a peer is watched by pidfd, which becomes readable when the process is dead, whatever it was doing and
whoever inherited its sockets. If the kernel provides none, the control socket alone is watched: forked children close
their copies of it, so its end is the end of the process, too.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from det_core._clock import monotonic
from det_core.errors import CollectiveMismatch, CollectiveTimeout, ContextClosed, DistributedError, PeerLost
from det_core.ipc._event_loop import EventLoop
from det_core.ipc._frames import Call, Kind, Op, encode
from det_core.ipc._peer import MAX_IN_FLIGHT_BYTES, Peer
from det_core.ipc._unix_link import UnixLink

T = TypeVar("T")

logger = logging.getLogger("det_core.ipc")
WARN_AFTER = 10.0
"""Seconds of waiting after which a warning names the ranks that are waited for."""
ABORT_NOTICE_TIMEOUT = 2.0
"""Maximum time in seconds to notify the other ranks of an abort before this rank's own calls raise it."""
_NOTICE_POLL_INTERVAL = 0.05
"""Seconds between two checks of that, for peers on unix sockets, which acknowledge nothing."""
MAX_NAMED = 16
"""Maximum number of ranks that a message names: with 1,024 ranks the chief would send each the names of all others."""
_DEFAULT_CAUSE = "it may be late, suspended, or wait for memory or a disk"
POLL_INTERVAL = 0.2
"""Seconds between two checks of a wait without a wakeup; a thousand ranks with 20 checks a second take a whole CPU."""


class AbortReason(NamedTuple):
    """Reason for which all ranks of the job abort."""

    kind: str
    """A key of ``_ERRORS``, or ``ended`` if a rank has ended the job on purpose."""
    text: str
    chief_knows: bool = False
    """Whether the reason has passed rank 0, to which a thousand ranks need not repeat it."""
    lost: int | None = None
    """Job rank of the lost rank, which will acknowledge nothing, or None if no rank is lost."""

    def error(self) -> BaseException:
        """Return a new exception for it."""
        if self.kind == "ended":
            return SystemExit(0)
        return _ERRORS[self.kind](self.text)

    def encode(self) -> bytes:
        """Encode it for the wire."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: Any) -> AbortReason:
        """Decode it from the wire."""
        reason = cls(*json.loads(bytes(data)))
        if reason.kind != "ended" and reason.kind not in _ERRORS:
            return reason._replace(kind="broken")
        return reason


_ERRORS: dict[str, type[DistributedError]] = {
    "lost": PeerLost,
    "mismatch": CollectiveMismatch,
    "closed": ContextClosed,
    "broken": DistributedError,
}


class Membership:
    """Peers of one rank in a communicator, and the reason for which they abort together.

    Args:
        rank: this rank's number in the communicator.
        job_ranks: number in the job of each rank, which differs in the communicator of one node.
        timeout: default timeout of a wait in seconds, or None for no timeout.
        max_in_flight: maximum of bytes in flight to one peer.
    """

    def __init__(
        self,
        rank: int,
        job_ranks: Sequence[int],
        *,
        timeout: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT_BYTES,
    ) -> None:
        self.rank = rank
        self.size = len(job_ranks)
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.peers: dict[int, Peer] = {}
        """By rank, all other ranks on the chief, and the chief on a worker."""
        self.departures = 0
        """Number of goodbyes to this rank."""
        self.abort_reason: AbortReason | None = None
        self.calls: dict[str, dict[int, tuple[Op, int]]] = {}
        """By channel and rank, the last known collective."""
        self.waits: dict[int, dict[str, tuple[int, str]]] = {}
        """By rank and channel, the number of the last call known to wait, and the script's call that makes it."""
        self.describe_call: Callable[[], str] = lambda: ""
        """Return the script's call in this thread, or "" if there is none, as in a thread of det_core."""
        self.wakers: list[Callable[[], None]] = []
        """Callbacks that wake each waiting call."""
        self._job_ranks = job_ranks
        self._ordered: tuple[Peer, ...] = ()
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []
        self._forward_to: list[Membership] = []
        self._pending_reason: AbortReason | None = None
        """The abort reason, from when this rank begins to notify others of it."""
        self._publish_at = 0.0
        """Deadline of these notices, or 0 until all are sent."""
        self._published = threading.Event()
        self.loop = EventLoop(f"det_core-ipc-{rank}", self._on_crash)

    # peers

    def job_rank(self, rank: int) -> int:
        """Return the number in the job of a rank of this communicator."""
        return self._job_ranks[rank]

    @property
    def label(self) -> str:
        """This rank's name in messages."""
        return f"rank {self.job_rank(self.rank)}"

    def others(self) -> list[Peer]:
        """Return the peers that have neither departed nor died."""
        return [peer for peer in list(self.peers.values()) if not peer.is_gone]

    def in_order(self) -> Sequence[Peer]:
        """Return all peers, by rank."""
        if len(self._ordered) != len(self.peers):
            self._ordered = tuple(self.peers[rank] for rank in sorted(self.peers))
        return self._ordered

    def last_call(self, rank: int, channel: str | None = None) -> str:
        """Return the last known collectives of a rank, or the one on ``channel``, for messages."""
        channels = list(self.calls.items())
        if channel is not None:
            channels = [(channel, self.calls.get(channel, {}))]
        return ", ".join(str(Call(name, *calls[rank])) for name, calls in channels if rank in calls) or "none"

    def wait_elsewhere(self, rank: int, channel: str) -> str:
        """Return the script's call in which ``rank`` waits on a channel other than ``channel``, or "".

        On the chief. A worker's wait counts until the chief has made that call, too.
        """
        for name, (number, script_call) in list(self.waits.get(rank, {}).items()):
            _, own_number = self.calls.get(name, {}).get(self.rank, (None, 0))
            if name != channel and script_call and (rank == self.rank or number > own_number):
                return script_call
        return ""

    def on_disconnect(self, peer: Peer) -> None:
        """Handle the end of a connection or process, a loss unless the peer has departed; on the ipc thread."""
        if not peer.dead:
            self._drop(peer)
            if not peer.departed:
                self.abort_lost(peer)

    def _drop(self, peer: Peer) -> None:
        peer.kill()
        if isinstance(peer.control, UnixLink):
            self.loop.unwatch(peer.control.fd)
        if peer.pidfd is not None:
            self.loop.unwatch(peer.pidfd)
        self.wake_all()

    # abort

    def raise_if_aborted(self) -> None:
        """Raise the abort reason, if there is one.

        Raises:
            PeerLost: If a rank is lost.
            CollectiveMismatch: If ranks made different calls.
            SystemExit: If another rank has ended the job.
            ContextClosed: If the communicator is closed, or this is a forked child.
        """
        if self.abort_reason is not None:
            raise self.abort_reason.error()

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called on the ipc thread once the job aborts or ends, or at once if it already has."""

        def add() -> None:
            self._callbacks.append(callback)
            if self.abort_reason is not None:
                callback()

        self.loop.call_soon(add)

    def abort_lost(self, peer: Peer) -> None:
        """Abort because a required rank is gone."""
        lost: int | None = peer.job_rank
        if peer.departed:
            lost = None
            event = "has closed its context"
            if peer.failure:
                event += f" after {peer.failure}"
        elif peer.exiting:
            event = "exited without closing its DistributedContext"
        elif isinstance(peer.control, UnixLink):
            event = "died"
        else:
            event = "died or cannot be reached"
        self.abort(
            AbortReason("lost", f"{peer} {event}; last known call: {self.last_call(peer.rank)}", lost=lost), peer
        )

    def forward_aborts_to(self, other: Membership) -> None:
        """Abort ``other`` whenever this communicator aborts, for the same reason."""
        with self._lock:
            self._forward_to.append(other)
            reason = self._pending_reason
        if reason is not None:
            other.abort(reason, wait=False)

    def abort(self, reason: AbortReason, sender: Peer | None = None, *, wait: bool = True) -> None:
        """Notify the other ranks of the reason, then raise it from every call of this rank. The first reason counts.

        Args:
            reason: the reason.
            sender: the peer that sent it, which needs no notice.
            wait: whether to return only once this rank's calls raise it. Ignored on the ipc thread.
        """
        if self.job_rank(self.rank) == 0:
            reason = reason._replace(chief_knows=True)
        with self._lock:
            is_first = self._pending_reason is None
            if is_first:
                self._pending_reason = reason
            forward_to = list(self._forward_to)
        if is_first:
            for other in forward_to:
                other.abort(reason, wait=False)
            data = encode(Kind.ABORT, rank=self.rank, body=reason.encode())
            for peer in self.others():
                if peer.job_rank == reason.lost:
                    self.loop.call_soon(partial(self.on_disconnect, peer))
                elif peer is not sender and not (peer.job_rank == 0 and reason.chief_knows):
                    peer.send_with_ack(data)
            # Not published before: a script may exit as soon as a call raises, and take the reason with it. Its peers
            # would then name this rank instead of the one that failed first.
            self._publish_at = monotonic() + ABORT_NOTICE_TIMEOUT
            self.loop.call_soon(self._poll_until_published)
        if wait and threading.current_thread() is not self.loop.thread:
            self._published.wait(ABORT_NOTICE_TIMEOUT + 1.0)

    def on_ack(self, peer: Peer) -> None:
        """Record an acknowledgement of ``peer``, which may be the last one that an abort waits for."""
        peer.on_ack()
        for membership in (self, *self._forward_to):
            if membership._publish_at:
                membership.loop.call_soon(membership._publish_once_notified)

    def _poll_until_published(self) -> None:
        self._publish_once_notified()
        if not self._published.is_set():
            self.loop.call_later(_NOTICE_POLL_INTERVAL, self._poll_until_published)

    def _publish_once_notified(self) -> None:
        if self._pending_reason is None or not self._publish_at or self._published.is_set():
            return
        both = (self, *self._forward_to)
        if monotonic() >= self._publish_at or all(membership._has_notified_all() for membership in both):
            self._publish(self._pending_reason)

    def _has_notified_all(self) -> bool:
        """Return whether each living peer will receive the reason even if this process ends now."""
        # Before _publish_at is set all look notified: a thread, of this communicator or the one that it forwards to,
        # is about to send the notices.
        return self._publish_at > 0.0 and all(peer.is_gone or peer.notified for peer in list(self.peers.values()))

    def _publish(self, reason: AbortReason) -> None:
        if reason.kind == "ended":
            logger.info("another rank has ended the job: %s", reason.text)
        if self.abort_reason is None:
            self.abort_reason = reason
        self._published.set()
        self.wake_all()
        for callback in self._callbacks:
            callback()

    def _on_crash(self, error: BaseException) -> None:
        reason = AbortReason("broken", f"ipc thread of {self.label} failed: {type(error).__name__}: {error}")
        self.abort(reason)
        # At once: the thread that would publish it after the notices has failed.
        self._publish(reason)

    def wake_all(self) -> None:
        """Wake every waiting call."""
        for wake in self.wakers:
            wake()

    # waiting

    def wait_loop(
        self,
        ready: Callable[[], object],
        operation: Callable[[], object],
        waiting_for: Callable[[], str],
        *,
        timeout: float | None,
        check: Callable[[], None] = lambda: None,
        refresh: Callable[[], None] = lambda: None,
        conflict: Callable[[], str] = lambda: "",
        interval: float = POLL_INTERVAL,
    ) -> Iterator[float]:
        """Yield poll intervals in seconds until ready; warn once, raise at the deadline.

        Args:
            ready: returns whether the wait is over.
            operation: returns the waiting operation, for messages.
            waiting_for: returns the names of the ranks that are waited for, for messages.
            timeout: maximum wait in seconds, or None for no maximum.
            check: called before each interval; raises if the wait cannot succeed any more.
            refresh: called before the warning and the deadline, and at intervals from then on, to query the chief for
                the results of ``waiting_for`` and ``conflict``.
            conflict: returns the other call of its script in which a rank waits instead, or "" if none is known.
            interval: maximum of an interval in seconds.

        Raises:
            CollectiveTimeout: At the deadline.
        """
        began = monotonic()
        deadline = math.inf if timeout is None else timeout
        # Half of the way, so that the chief's answer is there by the time of the message.
        refresh_at = min(WARN_AFTER, deadline) / 2
        warn_at = WARN_AFTER
        warned = ""
        explained = ""
        while not ready():
            check()
            waited = monotonic() - began
            if waited >= deadline:
                text = f"{operation()} timed out after {timeout:g} s waiting for {waiting_for()}"
                raise CollectiveTimeout("; ".join(filter(None, (text, conflict()))))
            if waited >= refresh_at:
                refresh_at = waited + max(WARN_AFTER / 2, POLL_INTERVAL)
                refresh()
            if waited >= warn_at:
                warn_at = waited + max(WARN_AFTER / 2, POLL_INTERVAL)
                cause = "" if explained else conflict()
                # A second warning only if the cause, which the chief may find late, was missing in the first.
                if cause or not warned:
                    warned = waiting_for()
                    explained = cause
                    text = f"{self.label} in {operation()} has waited for {waited:.0f} s for {warned}"
                    logger.warning("%s; %s", text, cause or _DEFAULT_CAUSE)
            yield max(0.0, min(interval, min(refresh_at, warn_at, deadline) - waited))
        if warned:
            named = warned.split(", last known call")[0]
            logger.warning("%s in %s: %s responded after %.0f s", self.label, operation(), named, monotonic() - began)


def some_of(items: Sequence[T], name: Callable[[T], str], separator: str = ", ") -> str:
    """Return the names of the first of ``items``, and the number of others."""
    text = separator.join(name(item) for item in items[:MAX_NAMED])
    if len(items) > MAX_NAMED:
        text += f" and {len(items) - MAX_NAMED} others"
    return text
