"""A star: the chief, rank 0, linked to every other rank.

Why not one ZMQ socket for everything: a ZMQ message between two processes of a machine passes through two I/O
threads, which costs two context switches a hop, copies large messages at each hop, and tells nothing about who died.
So ranks of one machine talk over unix sockets of our own; ZMQ carries the links between machines
(:mod:`det_core.ipc._zmq_link`), for its CURVE encryption.

Threads: the ipc thread (:mod:`det_core.ipc._event_loop`) reads control links, watches peers and sends what was queued.
Calling threads send directly and, on the user lane, read directly.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from det_core._clock import monotonic
from det_core.ipc._collectives import Channel
from det_core.ipc._frames import BadFrame, Frame, Kind, encode
from det_core.ipc._membership import (
    ABORT_NOTICE_TIMEOUT,
    MAX_IN_FLIGHT_BYTES,
    AbortReason,
    Membership,
    Peer,
    some_of,
    wait_loop,
)
from det_core.ipc._serialization import Mapper, size_of
from det_core.ipc._unix_link import UnixLink

logger = logging.getLogger("det_core.ipc")

Handler = Callable[[int, Any], None]
_DEPARTURE_DELAY = 0.02
"""Seconds for which the chief collects departures before it tells the workers of them."""


class Communicator(Membership):
    """The links of one rank, and what travels over them beside collectives.

    A star is made by :func:`det_core.ipc.connect`, which does the rendezvous. Arguments as for ``Membership``.
    """

    def __init__(
        self, *, rank: int, job_ranks: Sequence[int], timeout: float | None = None, bound: int = MAX_IN_FLIGHT_BYTES
    ) -> None:
        super().__init__(rank, job_ranks, timeout=timeout, bound=bound)
        self.closing = False
        """This rank says goodbye, or has."""
        self.on_close: list[Callable[[], None]] = []
        """What else to close with the star, and (the second list) in a forked child."""
        self.on_fork: list[Callable[[], None]] = []
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the chief says that every rank is there."""
        self._mapper = Mapper()
        self._channels: dict[str, Channel] = {}
        self._departed: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, str] = {}
        self._unannounced: dict[int, tuple[dict[str, Any], str | None]] = {}
        """On the chief, those of whom the other workers are still to be told."""
        self._handlers: dict[str, Handler] = {}
        self._undelivered: dict[str, list[tuple[int, Any]]] = {}
        self._frame_handlers: dict[int, Callable[[Peer, Frame], object]] = {
            Kind.CALL: self._on_call,
            Kind.ENTERED: lambda _peer, frame: self.open_channel(frame.name).on_entered(frame),
            Kind.ASK: lambda peer, frame: peer.control.send(self.open_channel(frame.name).answer(frame)),
            Kind.ANSWER: lambda _peer, frame: self.open_channel(frame.name).answered(frame),
            Kind.POST: self._on_post,
            Kind.CREDIT: self._on_credit,
            Kind.ABORT: self._on_remote_abort,
            Kind.EXITING: self._on_exiting,
            Kind.GOODBYE: self._on_goodbye,
            Kind.ACK: lambda peer, _frame: self.on_ack(peer),
            Kind.DEPARTED: lambda _peer, frame: self._depart(pickle.loads(frame.segments[0])),
            Kind.READY: lambda _peer, _frame: self.on_ready(),
        }
        _open_communicators.add(self)

    # for contexts

    def channel(self, name: str) -> Channel:
        """The collectives called ``name``, with a sequence of their own; any one thread may use a lane."""
        self._check_open()
        return self.open_channel(name)

    def post(self, topic: str, message: Any, *, to: int | None = None) -> None:
        """Send ``message`` to the subscribers of ``topic``, in order, without waiting for anything.

        Args:
            to: on the chief the rank to send to, or None for all workers; a worker's post goes to the chief.
        """
        body = pickle.dumps(message, protocol=5)
        self._check_open()
        data = encode(Kind.POST, name=topic, rank=self.rank, body=body)
        for peer in self.others():
            if to is None or self.rank or peer.rank == to:
                peer.control.send(data)

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have ``handler(from_rank, message)`` called on the ipc thread for every message of ``topic``.

        Messages that came earlier were kept and are delivered now.
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
            code: such as ``invalid_hp``.
            reason: for the logs.
        """
        self._check_open()
        data = encode(Kind.ABORT, rank=self.rank, body=AbortReason("ended", f"{code}: {reason}").encode())
        for peer in self.others():
            peer.send_with_ack(data)

    def departed(self) -> Mapping[int, dict[str, Any]]:
        """The ranks that said goodbye, with the farewell each gave to ``close``."""
        return MappingProxyType(self._departed)

    def failures(self) -> Mapping[int, str]:
        """The ranks that said goodbye because of an error, with its text."""
        return MappingProxyType(self._failures)

    # for the rendezvous

    def new_link(self, sock: socket.socket) -> UnixLink:
        """A control link, whose queue the ipc thread sends on."""

        def watch_writable(link: UnixLink, queued: bool) -> None:
            self.loop.modify(link.fd, select.EPOLLIN | (select.EPOLLOUT if queued else 0))

        return UnixLink(sock, watch_writable)

    def new_data_link(self, sock: socket.socket, rank: int) -> UnixLink:
        """The user lane's own link: its queue is sent on by the ipc thread, its frames are read by callers."""

        def watch_writable(link: UnixLink, queued: bool) -> None:
            if queued:
                self.loop.watch(link.fd, select.EPOLLOUT, lambda _events: self._flush_data(rank))
            else:
                self.loop.unwatch(link.fd)

        return UnixLink(sock, watch_writable)

    def admit(self, peer: Peer) -> None:
        """Link up with ``peer``; on the ipc thread."""
        self.peers[peer.rank] = peer
        if isinstance(link := peer.control, UnixLink):
            self.loop.watch(link.fd, select.EPOLLIN, lambda _events: self._on_link(peer, link))
            if (pidfd := peer.watch_process()) is not None:
                self.loop.watch(pidfd, select.EPOLLIN, lambda _events: self._on_death(peer, link))
        if peer.data is not None:
            self.open_channel("user").attach(peer.data)

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Take in one control frame.

        Raises:
            BadFrame: of no kind that one who is in may send.
        """
        handler = self._frame_handlers.get(frame.kind)
        if handler is None:
            raise BadFrame(f"kind {frame.kind}")
        handler(peer, frame)

    # on the ipc thread: the links

    def open_channel(self, name: str) -> Channel:
        """As ``lane``, also while the star closes: frames for it may still come."""
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = Channel(self, name, self._mapper)
            return channel

    def _flush_data(self, rank: int) -> None:
        self.peers[rank].flush_data()
        self.wake_all()

    def _on_link(self, peer: Peer, link: UnixLink) -> None:
        """The link can be read, or written to."""
        if link.queued:
            link.flush()
        self._read(peer, link)

    def _read(self, peer: Peer, link: UnixLink) -> bool:
        """Take in some of what has arrived; return whether there may be more."""
        try:
            frames = link.receive()
            for frame in frames:
                self.dispatch(peer, frame)
        except BadFrame as e:
            self.abort(AbortReason("broken", f"{peer} sent what is no message ({e})"))
            self._drop(peer)
            return False
        if link.eof:
            self.on_disconnect(peer)
        return not (link.is_drained or link.eof)

    def _on_death(self, peer: Peer, link: UnixLink) -> None:
        """The process is dead; what it said before counts."""
        while not peer.dead and self._read(peer, link):
            pass
        self.on_disconnect(peer)

    # on the ipc thread: what arrives beside the user lane's frames

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        frame.owed = size_of(frame.segments)
        self.open_channel(frame.name).deliver(frame)

    def _on_post(self, _peer: Peer, frame: Frame) -> None:
        message = pickle.loads(frame.segments[0])
        handler = self._handlers.get(frame.name)
        if handler is None:
            self._undelivered.setdefault(frame.name, []).append((frame.rank, message))
        else:
            handler(frame.rank, message)

    def _on_credit(self, peer: Peer, frame: Frame) -> None:
        peer.credit(frame.number)
        self.wake_all()

    def _on_remote_abort(self, peer: Peer, frame: Frame) -> None:
        peer.acknowledge(self.rank)
        self.abort(AbortReason.decode(frame.segments[0]), peer)

    def _on_exiting(self, peer: Peer, _frame: Frame) -> None:
        peer.exiting = True
        peer.acknowledge(self.rank)

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        exit_info, peer.failure = pickle.loads(frame.segments[0])
        self._depart({peer.rank: (exit_info, peer.failure)})
        peer.departed = True
        self.departures += 1
        peer.acknowledge(self.rank)
        if self.rank == 0:
            with self._lock:
                if not self._unannounced:
                    self.loop.call_later(_DEPARTURE_DELAY, self._announce_departures)
                self._unannounced[peer.rank] = exit_info, peer.failure
        self.wake_all()

    def _announce_departures(self) -> None:
        """Tell the other workers who has departed: at the end of a job all do, and each would be told of each."""
        with self._lock:
            departures = self._unannounced
            self._unannounced = {}
        if departures:
            data = encode(Kind.DEPARTED, body=pickle.dumps(departures, protocol=5))
            for other in self.others():
                other.control.send(data)

    def _depart(self, more: Mapping[int, tuple[dict[str, Any], str | None]]) -> None:
        # new ones: callers read them at any time
        self._failures = {**self._failures, **{rank: text for rank, (_, text) in more.items() if text is not None}}
        self._departed = {**self._departed, **{rank: exit_info for rank, (exit_info, _) in more.items()}}

    # the end

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Say goodbye, once every living peer has what was sent to it, and let go of everything. Idempotent.

        Args:
            farewell: what the other ranks read in ``departed()``.
            failure: why this rank stops; part of the error of a rank whose later call needs this one.
        """
        if self.closing:  # looked at first without the lock, which may be held for ever in a forked child
            return
        with self._lock:
            if self.closing:
                return
            self.closing = True
        assert threading.current_thread() is not self.loop.thread, "a star cannot be closed on its own ipc thread"
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        body = pickle.dumps((dict(exit_info or {}), text), protocol=5)
        try:
            self._announce_departures()
            self._drain_to_peers(lambda peer: not peer.queued)
            for peer in list(self.peers.values()):  # also to a chief that has closed, or it would take this for a death
                if not peer.dead:
                    peer.send_with_ack(encode(Kind.GOODBYE, rank=self.rank, body=body))
            # A goodbye is acknowledged before TCP is closed, else a reset may eat it.
            self._drain_to_peers(lambda peer: peer.notified)
        finally:
            ended = self.loop.stop()  # first, as its handlers may still post an answer to what has come meanwhile
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

    def _drain_to_peers(self, has: Callable[[Peer], bool]) -> None:
        """Wait until every peer has what was sent to it; not for long in a job that is broken anyway."""
        broken_at: float | None = None

        def done() -> bool:
            nonlocal broken_at
            if self.abort_reason is not None:
                broken_at = broken_at or monotonic()
            given_up = broken_at is not None and monotonic() - broken_at > ABORT_NOTICE_TIMEOUT
            return given_up or not self.loop.thread.is_alive() or all(has(p) for p in self.others())

        def waiting_for() -> str:
            return some_of([p for p in self.others() if not has(p)], str) + " to take what was sent to it"

        pause = 0.0005
        for seconds in wait_loop(done, self.label, lambda: "close()", waiting_for):
            time.sleep(min(seconds, pause))
            pause *= 2

    def on_process_exit(self) -> None:
        """The process exits and nobody has closed the star: tell the others what that was, and see that they hear."""
        if self.closing:
            return
        for peer in self.others():
            peer.send_with_ack(encode(Kind.EXITING, rank=self.rank))
        until = monotonic() + ABORT_NOTICE_TIMEOUT
        while not all(peer.notified for peer in self.others()) and monotonic() < until:
            time.sleep(0.002)

    def close_in_child(self) -> None:
        """In a forked child: close the copies of the descriptors, without a word to anybody."""
        self.closing = True
        self.abort_reason = AbortReason(
            "closed", "this DistributedContext belongs to the process that this one was forked from"
        )
        self.loop.close()
        for channel in self._channels.values():
            channel.close_in_child()
        for peer in self.peers.values():
            peer.close()
        for close_in_child in self.on_fork:
            close_in_child()

    def _check_open(self) -> None:
        if self.abort_reason is not None and self.abort_reason.kind == "closed":
            raise self.abort_reason.error()


_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""Every open star of this process: what a fork and the end of the process have to reach."""


def _close_all_in_child() -> None:
    for communicator in list(_open_communicators):
        communicator.close_in_child()
    _open_communicators.clear()


def _on_process_exit() -> None:
    for communicator in list(_open_communicators):
        communicator.on_process_exit()


os.register_at_fork(after_in_child=_close_all_in_child)
atexit.register(_on_process_exit)
