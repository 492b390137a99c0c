"""Who is in the job and still there, why it cannot go on, and how long one waits for the others.

On one machine a peer is watched by pidfd, which becomes readable when the process is dead, whatever it was doing and
whoever inherited its sockets. Where the kernel refuses one, the control socket alone is watched: it is closed in
forked children, so its end is the end of the process too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from det_core._clock import monotonic
from det_core.errors import CollectiveMismatch, CollectiveTimeout, ContextClosed, DistributedError, PeerLost
from det_core.ipc._event_loop import EventLoop
from det_core.ipc._frames import Call, Frame, Kind, Op, encode
from det_core.ipc._serialization import Packet
from det_core.ipc._unix_link import UnixLink, peer_credentials
from det_core.ipc._zmq_link import ZmqLink

T = TypeVar("T")

logger = logging.getLogger("det_core.ipc")
MAX_IN_FLIGHT_BYTES = 256 << 20
"""Bytes that may be on their way to one peer before a sender waits."""
WARN_AFTER = 10.0
"""Seconds of waiting after which a warning says for whom."""
_NOTICE_POLL_INTERVAL = 0.05
"""Seconds between two looks whether the others know, for what no answer of theirs shows."""
ABORT_NOTICE_TIMEOUT = 2.0
"""Seconds that the others get to hear why the job is broken, before this rank's own calls raise it."""
MAX_NAMED = 16
"""Ranks that a message names; of 1,024 ranks each would be told of all others, by the chief."""
POLL_INTERVAL = 0.2
"""Seconds between two looks of a wait that nobody wakes. A thousand ranks in twenty looks a second are a processor."""


class AbortReason(NamedTuple):
    """Why the job cannot go on, one reason for all its ranks."""

    kind: str
    """A key of the errors below, or ``ended`` when a rank has ended the job on purpose."""
    text: str
    chief_knows: bool = False
    """Whether it has been at rank 0, to which a thousand ranks need not repeat it."""
    lost: int | None = None
    """The rank, by its number in the job, that died or cannot be reached: it will not answer anybody."""

    def error(self) -> BaseException:
        """A new exception to raise for it."""
        return SystemExit(0) if self.kind == "ended" else _ERRORS[self.kind](self.text)

    def encode(self) -> bytes:
        """For the wire."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: Any) -> AbortReason:
        """From the wire."""
        abort_reason = cls(*json.loads(bytes(data)))
        return abort_reason if abort_reason.kind in ("ended", *_ERRORS) else abort_reason._replace(kind="broken")


_ERRORS: dict[str, type[DistributedError]] = {
    "lost": PeerLost,
    "mismatch": CollectiveMismatch,
    "closed": ContextClosed,
    "broken": DistributedError,
}


class Peer:
    """Another rank: who it is, the links to it, and whether it is still there.

    Args:
        rank: its number in the star.
        name: its number in the job, which is another one in the star of a machine.
        data: the user lane's own socket; None between machines.
        bound: bytes on their way to it before a sender waits.
    """

    def __init__(
        self,
        rank: int,
        job_rank: int,
        host: str,
        pid: int,
        control: UnixLink | ZmqLink,
        data: UnixLink | None,
        *,
        bound: int,
    ) -> None:
        self.rank = rank
        self.job_rank = job_rank
        self.host = host
        self.pid = pid
        self.control, self.data = control, data
        self.pidfd: int | None = None
        self.departed = False
        """It said goodbye."""
        self.dead = False
        self.exiting = False
        """It said that its process exits without closing."""
        self.failure: str | None = None
        self.in_flight = 0
        """Bytes on their way to it."""
        self._unseen = 0
        self._owed = 0
        self._bound = bound
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"rank {self.job_rank} (host {self.host}, pid {self.pid})"

    @property
    def is_gone(self) -> bool:
        """Whether nothing needs to be sent to it any more."""
        return self.departed or self.dead

    @property
    def queued(self) -> int:
        """How much waits in this process's memory to be sent to it."""
        return self.control.queued + (0 if self.data is None else self.data.queued)

    def send_with_ack(self, data: bytes) -> None:
        """Send a small control frame; when it has arrived, the peer says so."""
        with self._lock:
            self._unseen += 1
        self.control.send(data)

    def acknowledge(self, label: int) -> None:
        """Say that what it announced has arrived, where it waits for that: see ``informed``."""
        if not isinstance(self.control, UnixLink):
            self.control.send(encode(Kind.ACK, rank=label))

    def on_ack(self) -> None:
        """It says so."""
        with self._lock:
            self._unseen -= 1

    @property
    def notified(self) -> bool:
        """Whether what was announced will reach it even if this process ends now.

        On one machine that is so when the kernel has it; what ZMQ or TCP hold may be lost with the process.
        """
        return not self.queued if isinstance(self.control, UnixLink) else self._unseen <= 0

    # calls, and how much of them is on its way

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes need not wait. One message may always go, however large."""
        return not self.in_flight or self.in_flight + size <= self._bound

    def send_small(self, data: bytes) -> bool:
        """Send a small call's frame over the data link; False: there is none, or no room."""
        if self.data is None or not self.has_room(len(data)):
            return False
        if queued := self.data.send(data):
            self.credit(-queued)
        return True

    def send_call(self, packet: Packet, *, direct: bool) -> None:
        """Send a call's frame, over the data link if ``direct`` and there is one."""
        if direct and self.data is not None:
            packet.local()
            self.credit(-packet.file_bytes)
            self.credit(-self.data.send(packet))
        else:
            self.credit(-packet.size)
            self.control.send(packet)

    def flush_data(self) -> None:
        """Send on what the data link has queued."""
        if self.data is not None:
            self.credit(self.data.flush())

    def credit(self, size: int) -> None:
        """So many bytes are on their way no more (or, when negative, are from now on)."""
        with self._lock:
            self.in_flight -= size

    def return_credit(self, frame: Frame, label: int) -> None:
        """A frame of this peer has been used up: give it the room back, many small ones together."""
        with self._lock:
            self._owed += frame.owed
            if self._owed < min(1 << 20, self._bound // 4):
                return
            owed, self._owed = self._owed, 0
        self.control.send(encode(Kind.CREDIT, rank=label, number=owed))

    # the end

    def watch_process(self) -> int | None:
        """A descriptor that becomes readable when the process dies; None where there is no such thing.

        The pid is the kernel's, not what the process says of itself: in another name space that may be anybody's.
        """
        if isinstance(self.control, UnixLink) and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(peer_credentials(self.control.sock)[0])
        return self.pidfd

    def kill(self) -> None:
        """Nothing comes from it any more and nothing goes to it."""
        self.dead = True
        self.control.kill()
        if self.data is not None:
            self.data.kill()

    def close(self) -> None:
        """Let go of the links."""
        self.control.close()
        if self.data is not None:
            self.data.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Membership:
    """The peers of one rank in a star, and the trouble that ends their work together.

    Args:
        rank: this rank's number in the star.
        names: what people call each rank: its number in the job, which is another one in the star of a machine.
        timeout: default deadline of a wait in seconds; None: none.
        bound: bytes on their way to one peer before a sender waits.
    """

    def __init__(
        self, rank: int, job_ranks: Sequence[int], *, timeout: float | None = None, bound: int = MAX_IN_FLIGHT_BYTES
    ) -> None:
        self.rank = rank
        self.size = len(job_ranks)
        self.timeout = timeout
        self.bound = bound
        self.peers: dict[int, Peer] = {}
        """By rank: everybody on the chief, the chief on a worker."""
        self.departures = 0
        """How many ranks have said goodbye to this one."""
        self.abort_reason: AbortReason | None = None
        self.calls: dict[str, dict[int, tuple[Op, int]]] = {}
        """By lane and rank, the last collective heard of."""
        self.waits: dict[int, dict[str, tuple[int, str]]] = {}
        """By rank and lane, the last call known to wait: its number, and what the script calls to make it."""
        self.describe_call: Callable[[], str] = lambda: ""
        """Return what the script calls in this thread; empty: nothing, as in a thread of the package."""
        self.wakers: list[Callable[[], None]] = []
        """Have each call that waits look again."""
        self._job_ranks = job_ranks
        self._ordered: tuple[Peer, ...] = ()
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []
        self._sharers: list[Membership] = []
        self._breaking: AbortReason | None = None
        """The trouble, from when this rank begins to tell of it."""
        self._publish_at = 0.0
        """Deadline for telling of it; 0: it is not sent to all yet."""
        self._published = threading.Event()
        self.loop = EventLoop(f"det_core-ipc-{rank}", self._on_crash)

    # who is there

    def job_rank(self, rank: int) -> int:
        """The number in the job of this star's ``rank``."""
        return self._job_ranks[rank]

    @property
    def label(self) -> str:
        """This rank, for messages."""
        return f"rank {self.job_rank(self.rank)}"

    def others(self, *, departed: bool = False) -> list[Peer]:
        """The peers that are still there; with ``gone``, those that said goodbye instead."""
        return [p for p in list(self.peers.values()) if (p.departed if departed else not p.is_gone)]

    def in_order(self) -> Sequence[Peer]:
        """All peers, by rank."""
        if len(self._ordered) != len(self.peers):
            self._ordered = tuple(self.peers[rank] for rank in sorted(self.peers))
        return self._ordered

    def last_call(self, rank: int, channel: str | None = None) -> str:
        """The last collectives heard of a rank, or the one on ``lane``, for messages."""
        lanes = list(self.calls.items()) if channel is None else [(channel, self.calls.get(channel, {}))]
        return ", ".join(str(Call(name, *calls[rank])) for name, calls in lanes if rank in calls) or "none"

    def wait_elsewhere(self, rank: int, channel: str) -> str:
        """Return what the script of ``rank`` calls and waits in, if that is on another lane than ``lane``; else "".

        On the chief; of a worker a wait counts as long as the chief has not made that call.
        """
        for name, (number, script_call) in list(self.waits.get(rank, {}).items()):
            _, own_number = self.calls.get(name, {}).get(self.rank, (None, 0))
            if name != channel and script_call and (rank == self.rank or number > own_number):
                return script_call
        return ""

    def on_disconnect(self, peer: Peer) -> None:
        """Take in that a connection or process has ended, which is a loss where no goodbye came; on the ipc thread."""
        if not peer.dead:
            self._drop(peer)
            if not peer.departed:
                self.abort_lost(peer)

    def _drop(self, peer: Peer) -> None:
        """Receive nothing from ``peer`` any more and send it nothing."""
        peer.kill()
        if isinstance(peer.control, UnixLink):
            self.loop.unwatch(peer.control.fd)
        if peer.pidfd is not None:
            self.loop.unwatch(peer.pidfd)
        self.wake_all()

    # trouble

    def raise_if_aborted(self) -> None:
        """Raise what broke the job, if anything did.

        Raises:
            PeerLost, CollectiveMismatch: what broke it.
            SystemExit: another rank has ended the job.
            ContextClosed: the star is closed, or this is a forked child.
        """
        if self.abort_reason is not None:
            raise self.abort_reason.error()

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called on the ipc thread once the job is broken or ended; at once if it is already."""

        def add() -> None:
            self._callbacks.append(callback)
            if self.abort_reason is not None:
                callback()

        self.loop.call_soon(add)

    def abort_lost(self, peer: Peer) -> None:
        """A rank that is needed is not there any more."""
        if peer.departed:
            what = "has closed its context" + (f" after {peer.failure}" if peer.failure else "")
        elif peer.exiting:
            what = "exited without closing its DistributedContext"
        elif isinstance(peer.control, UnixLink):
            what = "died"
        else:
            what = "died or cannot be reached"
        text = f"{peer} {what}; the last call heard of it: {self.last_call(peer.rank)}"
        self.abort(AbortReason("lost", text, lost=None if peer.departed else peer.job_rank), peer)

    def forward_aborts_to(self, other: Membership) -> None:
        """Have the trouble of this star be that of ``other`` too."""
        with self._lock:
            self._sharers.append(other)
            abort_reason = self._breaking
        if abort_reason is not None:
            other.abort(abort_reason, wait=False)

    def abort(self, abort_reason: AbortReason, heard_from: Peer | None = None, *, wait: bool = True) -> None:
        """Remember why the job cannot go on, tell the other ranks, and wake up every waiting call.

        The others are told first: this rank's script may exit as soon as it hears of it, and would take the reason
        with it: they would name this rank. The first trouble is the one that counts.
        """
        if self.job_rank(self.rank) == 0:
            abort_reason = abort_reason._replace(chief_knows=True)
        with self._lock:
            first = self._breaking is None
            self._breaking = self._breaking or abort_reason
            sharers = list(self._sharers)
        if first:
            for communicator in sharers:
                communicator.abort(abort_reason, wait=False)
            data = encode(Kind.ABORT, rank=self.rank, body=abort_reason.encode())
            for peer in self.others():
                if peer.job_rank == abort_reason.lost:
                    self.loop.call_soon(partial(self.on_disconnect, peer))
                elif peer is not heard_from and not (peer.job_rank == 0 and abort_reason.chief_knows):
                    peer.send_with_ack(data)
            self._publish_at = monotonic() + ABORT_NOTICE_TIMEOUT
            self.loop.call_soon(self._poll_until_published)
        if wait and threading.current_thread() is not self.loop.thread:
            self._published.wait(ABORT_NOTICE_TIMEOUT + 1.0)

    def on_ack(self, peer: Peer) -> None:
        """Take in that what was announced to ``peer`` has arrived; it may be the last one."""
        peer.on_ack()
        for communicator in (self, *self._sharers):
            if communicator._publish_at:
                communicator.loop.call_soon(communicator._publish_once_told)

    def _poll_until_published(self) -> None:
        self._publish_once_told()
        if not self._published.is_set():
            self.loop.call_later(_NOTICE_POLL_INTERVAL, self._poll_until_published)

    def _publish_once_told(self) -> None:
        if self._breaking is None or not self._publish_at or self._published.is_set():
            return
        if monotonic() >= self._publish_at or all(
            communicator._has_told_all() for communicator in (self, *self._sharers)
        ):
            self._publish(self._breaking)

    def _has_told_all(self) -> bool:
        """Return whether each peer that is there will hear of the trouble even if this process ends now."""
        # Before _publish_at is set all look informed: a thread, of this star or the one it shares its trouble with, is
        # about to send it.
        return self._publish_at > 0.0 and all(peer.is_gone or peer.notified for peer in list(self.peers.values()))

    def _publish(self, abort_reason: AbortReason) -> None:
        if abort_reason.kind == "ended":
            logger.info("another rank has ended the job: %s", abort_reason.text)
        if self.abort_reason is None:
            self.abort_reason = abort_reason
        self._published.set()
        self.wake_all()
        for callback in self._callbacks:
            callback()

    def _on_crash(self, error: BaseException) -> None:
        abort_reason = AbortReason("broken", f"the ipc thread of {self.label} ended: {type(error).__name__}: {error}")
        self.abort(abort_reason)
        self._publish(abort_reason)

    def wake_all(self) -> None:
        """Have every call that waits look again, before its next tick."""
        for wake in self.wakers:
            wake()


def some_of(items: Sequence[T], name: Callable[[T], str], separator: str = ", ") -> str:
    """Return the names of the first of ``items``, and how many others there are."""
    text = separator.join(name(item) for item in items[:MAX_NAMED])
    return text if len(items) <= MAX_NAMED else f"{text} and {len(items) - MAX_NAMED} others"


def wait_loop(
    ready: Callable[[], object],
    label: str,
    operation: Callable[[], object],
    waiting_for: Callable[[], str],
    *,
    timeout: float | None = None,
    check: Callable[[], None] = lambda: None,
    ask: Callable[[], None] = lambda: None,
    conflict: Callable[[], str] = lambda: "",
    interval: float = POLL_INTERVAL,
) -> Iterator[float]:
    """The waiting rule, for every wait of this room: as long as everybody lives, with a word, and up to the deadline.

    Yields:
        Seconds to wait until the next look, until ``ready()``.

    Args:
        ready: whether the wait is over.
        me: who waits, for the messages,
        doing: in what, and
        whom: for whom.
        timeout: seconds until the deadline; None: none.
        check: raises when there is nothing to wait for any more.
        ask: called before the warning and the deadline, and once in a while from then on, to find out more for
            ``whom`` and ``clash``.
        clash: which call of its script keeps the other rank from making this one, as far as that is known.
        interval: maximum time between two looks in seconds.

    Raises:
        CollectiveTimeout: the deadline has passed.
    """
    began = monotonic()
    ask_at = min(WARN_AFTER, math.inf if timeout is None else timeout) / 2
    warn_at = WARN_AFTER
    warned = explained = ""
    while not ready():
        check()
        waited = monotonic() - began
        if timeout is not None and waited >= timeout:
            cause = conflict()
            raise CollectiveTimeout(
                f"{operation()} timed out after {timeout:g} s waiting for {waiting_for()}{cause and '; '}{cause}"
            )
        if waited >= ask_at:
            ask_at = waited + max(WARN_AFTER / 2, POLL_INTERVAL)
            ask()
        if waited >= warn_at:
            warn_at = waited + max(WARN_AFTER / 2, POLL_INTERVAL)
            cause = "" if explained else conflict()
            if cause or not warned:
                warned = waiting_for()
                explained = cause
                cause = cause or "it may be late, suspended, or wait for memory or a disk"
                logger.warning("%s in %s has waited for %.0f s for %s; %s", label, operation(), waited, warned, cause)
        due = min(ask_at, warn_at, math.inf if timeout is None else timeout)
        yield max(0.0, min(interval, due - waited))
    if warned:
        named = warned.split(", last call")[0]
        logger.warning("%s in %s: %s is back after %.0f s", label, operation(), named, monotonic() - began)
