"""Communicator: a rank's connections to a set of ranks, a star around the chief, rank 0.

Ranks of one node talk over unix sockets instead of ZMQ: there a message passes through two I/O threads, which costs two
context switches a hop, copies large messages at each hop, and reports no death. ZMQ carries the links between nodes
(:mod:`det_core.ipc._zmq_link`), for its CURVE encryption.

Threads: the ipc thread (:mod:`det_core.ipc._event_loop`) reads control links, watches peers and flushes queues.
Calling threads send directly and, on the user channel, receive directly.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from det_core._clock import monotonic
from det_core._forks import ForkGuard
from det_core.ipc._collectives import Channel
from det_core.ipc._frames import BadFrame, Frame, Kind, encode
from det_core.ipc._membership import ABORT_NOTICE_TIMEOUT, AbortReason, Membership, some_of
from det_core.ipc._peer import MAX_IN_FLIGHT_BYTES, Peer
from det_core.ipc._serialization import Mapper, size_of
from det_core.ipc._unix_link import UnixLink

logger = logging.getLogger("det_core.ipc")

Handler = Callable[[int, Any], None]
_DEPARTURE_DELAY = 0.02
"""Seconds for which the chief collects departures before it forwards them to the workers."""


class Communicator(Membership):
    """Links of one rank, and the messages over them beside collectives.

    Made by :func:`det_core.ipc.connect`, which does the rendezvous. Arguments as for ``Membership``.
    """

    def __init__(
        self,
        *,
        rank: int,
        job_ranks: Sequence[int],
        timeout: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT_BYTES,
    ) -> None:
        super().__init__(rank, job_ranks, timeout=timeout, max_in_flight=max_in_flight)
        self.closing = False
        """Whether ``close`` has begun."""
        self.on_close: list[Callable[[], None]] = []
        """Callbacks that close further parts of the communicator."""
        self.on_fork: list[Callable[[], None]] = []
        """Callbacks that close the descriptors of those parts in a forked child."""
        self.on_ready: Callable[[], None] = lambda: None
        """Callback for the chief's message that every rank is connected."""
        self._mapper = Mapper()
        self._channels: dict[str, Channel] = {}
        self._departed: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, str] = {}
        self._unannounced: dict[int, tuple[dict[str, Any], str | None]] = {}
        """On the chief, the departures that are not forwarded to the workers yet."""
        self._handlers: dict[str, Handler] = {}
        self._undelivered: dict[str, list[tuple[int, Any]]] = {}
        self._frame_handlers: dict[int, Callable[[Peer, Frame], object]] = {
            Kind.CALL: self._on_call,
            Kind.ENTERED: lambda _peer, frame: self.open_channel(frame.name).on_entered(frame),
            Kind.ASK: lambda peer, frame: peer.control.send(self.open_channel(frame.name).answer(frame)),
            Kind.ANSWER: lambda _peer, frame: self.open_channel(frame.name).on_answer(frame),
            Kind.POST: self._on_post,
            Kind.CREDIT: self._on_credit,
            Kind.ABORT: self._on_remote_abort,
            Kind.EXITING: self._on_exiting,
            Kind.GOODBYE: self._on_goodbye,
            Kind.ACK: lambda peer, _frame: self.on_ack(peer),
            Kind.DEPARTED: lambda _peer, frame: self._record_departures(pickle.loads(frame.segments[0])),
            Kind.READY: lambda _peer, _frame: self.on_ready(),
        }
        _open_communicators.add(self)

    # for contexts

    def channel(self, name: str) -> Channel:
        """Return the collectives of this name, an independent sequence of calls; one thread at a time."""
        self._check_open()
        return self.open_channel(name)

    def post(self, topic: str, message: Any, *, to: int | None = None) -> None:
        """Send ``message`` to the subscribers of ``topic``, in order and without waiting.

        Args:
            topic: name of the topic.
            message: any object that can be pickled.
            to: on the chief, the receiving rank, or None for all workers. A worker posts to the chief alone.
        """
        body = pickle.dumps(message, protocol=5)
        self._check_open()
        data = encode(Kind.POST, name=topic, rank=self.rank, body=body)
        for peer in self.others():
            if to is None or self.rank or peer.rank == to:
                peer.control.send(data)

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Call ``handler(from_rank, message)`` on the ipc thread for every message of ``topic``.

        Messages that arrived before are delivered first.
        """

        def add() -> None:
            self._handlers[topic] = handler
            for rank, message in self._undelivered.pop(topic, []):
                handler(rank, message)

        self.call_soon(add)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the ipc thread. May be called from a signal handler: it takes no lock."""
        self.loop.call_soon(fn)

    def end_job(self, code: str, reason: str) -> None:
        """End the job on every other rank: their next calls raise ``SystemExit(0)``.

        Args:
            code: code of the reason, such as ``invalid_hp``.
            reason: its text, for the logs.
        """
        self._check_open()
        data = encode(Kind.ABORT, rank=self.rank, body=AbortReason("ended", f"{code}: {reason}").encode())
        for peer in self.others():
            peer.send_with_ack(data)

    def departed(self) -> Mapping[int, dict[str, Any]]:
        """Return the exit info of the ranks that closed in order."""
        return MappingProxyType(self._departed)

    def failures(self) -> Mapping[int, str]:
        """Return the text of the error of each rank that closed because of one."""
        return MappingProxyType(self._failures)

    # for the rendezvous

    def new_link(self, sock: socket.socket) -> UnixLink:
        """Return a control link, whose queue the ipc thread flushes."""

        def watch_writable(link: UnixLink, is_queued: bool) -> None:
            events = select.EPOLLIN
            if is_queued:
                events |= select.EPOLLOUT
            self.loop.modify(link.fd, events)

        return UnixLink(sock, watch_writable)

    def new_data_link(self, sock: socket.socket, rank: int) -> UnixLink:
        """Return a link of the user channel: the ipc thread flushes its queue, callers receive its frames."""

        def watch_writable(link: UnixLink, is_queued: bool) -> None:
            if is_queued:
                self.loop.watch(link.fd, select.EPOLLOUT, lambda _events: self._flush_data(rank))
            else:
                self.loop.unwatch(link.fd)

        return UnixLink(sock, watch_writable)

    def admit(self, peer: Peer) -> None:
        """Add ``peer`` and read its links from now on; on the ipc thread."""
        self.peers[peer.rank] = peer
        if isinstance(link := peer.control, UnixLink):
            self.loop.watch(link.fd, select.EPOLLIN, lambda _events: self._on_link(peer, link))
            if (pidfd := peer.watch_process()) is not None:
                self.loop.watch(pidfd, select.EPOLLIN, lambda _events: self._on_death(peer, link))
        if peer.data is not None:
            self.open_channel("user").attach(peer.data)

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Handle one control frame.

        Raises:
            BadFrame: If no admitted peer may send frames of this kind.
        """
        handler = self._frame_handlers.get(frame.kind)
        if handler is None:
            raise BadFrame(f"unexpected frame of kind {frame.kind}")
        handler(peer, frame)

    def open_channel(self, name: str) -> Channel:
        """Return a channel as ``channel`` does, also during ``close``: frames for it may still arrive."""
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = Channel(self, name, self._mapper)
            return channel

    # on the ipc thread: links

    def _flush_data(self, rank: int) -> None:
        self.peers[rank].flush_data()
        self.wake_all()

    def _on_link(self, peer: Peer, link: UnixLink) -> None:
        if link.queued:
            link.flush()
        self._read(peer, link)

    def _read(self, peer: Peer, link: UnixLink) -> bool:
        """Read once and handle the frames; return whether more may be unread."""
        try:
            frames = link.receive()
            for frame in frames:
                self.dispatch(peer, frame)
        except BadFrame as e:
            self.abort(AbortReason("broken", f"invalid message from {peer}: {e}"))
            self._drop(peer)
            return False
        if link.eof:
            self.on_disconnect(peer)
        return not (link.is_drained or link.eof)

    def _on_death(self, peer: Peer, link: UnixLink) -> None:
        """Handle a peer's death after reading what it sent."""
        # The pidfd may be ready first, and the reason of the peer's abort still unread.
        while not peer.dead and self._read(peer, link):
            pass
        self.on_disconnect(peer)

    # on the ipc thread: frames

    def _on_call(self, _peer: Peer, frame: Frame) -> None:
        frame.credit = size_of(frame.segments)
        self.open_channel(frame.name).deliver(frame)

    def _on_post(self, _peer: Peer, frame: Frame) -> None:
        message = pickle.loads(frame.segments[0])
        handler = self._handlers.get(frame.name)
        if handler is None:
            self._undelivered.setdefault(frame.name, []).append((frame.rank, message))
        else:
            handler(frame.rank, message)

    def _on_credit(self, peer: Peer, frame: Frame) -> None:
        peer.on_credit(frame.number)
        self.wake_all()

    def _on_remote_abort(self, peer: Peer, frame: Frame) -> None:
        peer.acknowledge(self.rank)
        self.abort(AbortReason.decode(frame.segments[0]), peer)

    def _on_exiting(self, peer: Peer, _frame: Frame) -> None:
        peer.exiting = True
        peer.acknowledge(self.rank)

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        exit_info, peer.failure = pickle.loads(frame.segments[0])
        self._record_departures({peer.rank: (exit_info, peer.failure)})
        peer.departed = True
        self.departures += 1
        peer.acknowledge(self.rank)
        if self.rank == 0:
            with self._lock:
                if not self._unannounced:
                    self.loop.call_later(_DEPARTURE_DELAY, self._announce_departures)
                self._unannounced[peer.rank] = (exit_info, peer.failure)
        self.wake_all()

    def _announce_departures(self) -> None:
        # Together: at the end of a job all ranks depart, and one message for each to each would be a million for 1,024.
        with self._lock:
            departures = self._unannounced
            self._unannounced = {}
        if departures:
            data = encode(Kind.DEPARTED, body=pickle.dumps(departures, protocol=5))
            for other in self.others():
                other.control.send(data)

    def _record_departures(self, departures: Mapping[int, tuple[dict[str, Any], str | None]]) -> None:
        # New dictionaries, as callers in other threads may be iterating over the current ones.
        failures = dict(self._failures)
        departed = dict(self._departed)
        for rank, (exit_info, failure) in departures.items():
            departed[rank] = exit_info
            if failure is not None:
                failures[rank] = failure
        self._failures = failures
        self._departed = departed

    # the end

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Say goodbye after every living peer has all messages of this rank, and close everything. Idempotent.

        Args:
            exit_info: data for the ``departed()`` of the other ranks.
            failure: error that stops this rank, which becomes part of the error of each rank whose later call needs it.
        """
        # Without the lock at first: in a forked child it may be held forever.
        if self.closing:
            return
        with self._lock:
            if self.closing:
                return
            self.closing = True
        assert threading.current_thread() is not self.loop.thread, "a communicator cannot be closed on its ipc thread"
        text = None
        if failure is not None:
            text = f"{type(failure).__name__}: {failure}"
        body = pickle.dumps((dict(exit_info or {}), text), protocol=5)
        try:
            self._announce_departures()
            self._drain(lambda peer: not peer.queued)
            # Also to a chief that has departed: it would take the end of the connection for a death.
            for peer in list(self.peers.values()):
                if not peer.dead:
                    peer.send_with_ack(encode(Kind.GOODBYE, rank=self.rank, body=body))
            # Acknowledged before TCP is closed, as a reset discards what the peer has not read yet.
            self._drain(lambda peer: peer.notified)
        finally:
            # The loop first, whose handlers may still post replies to the last messages.
            ended = self.loop.stop()
            self.abort_reason = AbortReason("closed", "this DistributedContext is closed")
            self.wake_all()
            if ended:
                for channel in self._channels.values():
                    channel.close()
                for peer in self.peers.values():
                    peer.close()
                for close in self.on_close:
                    close()
                _open_communicators.discard(self)

    def _drain(self, is_done: Callable[[Peer], bool]) -> None:
        """Wait until this is so for every living peer; after an abort, for ``ABORT_NOTICE_TIMEOUT`` at most."""
        aborted_at: float | None = None

        def is_over() -> bool:
            nonlocal aborted_at
            if self.abort_reason is not None:
                aborted_at = aborted_at or monotonic()
                if monotonic() - aborted_at > ABORT_NOTICE_TIMEOUT:
                    return True
            return not self.loop.thread.is_alive() or all(is_done(peer) for peer in self.others())

        def waiting_for() -> str:
            return some_of([peer for peer in self.others() if not is_done(peer)], str) + " to receive its messages"

        # Nothing wakes this wait, and most end within a millisecond.
        pause = 0.0005
        for seconds in self.wait_loop(is_over, lambda: "close()", waiting_for, timeout=None):
            time.sleep(min(seconds, pause))
            pause *= 2

    def on_process_exit(self) -> None:
        """Notify the peers that the process exits without ``close``, and wait shortly until they know."""
        if self.closing:
            return
        for peer in self.others():
            peer.send_with_ack(encode(Kind.EXITING, rank=self.rank))
        deadline = monotonic() + ABORT_NOTICE_TIMEOUT
        while not all(peer.notified for peer in self.others()) and monotonic() < deadline:
            time.sleep(0.002)

    def close_in_child(self) -> None:
        """Close the copies of the descriptors in a forked child, without a message to any peer."""
        _open_communicators.discard(self)  # their numbers may be those of other files in a child of the child
        self.closing = True
        self.abort_reason = AbortReason("closed", "this DistributedContext belongs to the parent of this process")
        self.loop.close()
        for channel in self._channels.values():
            channel.close_in_child()
        for peer in self.peers.values():
            peer.close()
        for close in self.on_fork:
            close()

    def _check_open(self) -> None:
        if self.abort_reason is not None and self.abort_reason.kind == "closed":
            raise self.abort_reason.error()


# A child's copies of the sockets would keep the connections of a dead parent open.
_open_communicators = ForkGuard(Communicator.close_in_child)


def _on_process_exit() -> None:
    for communicator in list(_open_communicators):
        communicator.on_process_exit()


atexit.register(_on_process_exit)
