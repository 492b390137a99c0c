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
from det_core.ipc._collectives import Lane
from det_core.ipc._frames import BadFrame, Frame, Kind, encode
from det_core.ipc._membership import QUEUE_BOUND, TOLD_WITHIN, Membership, Peer, Trouble, some_of, waiting
from det_core.ipc._serialization import Mapper, size_of
from det_core.ipc._unix_link import UnixLink

logger = logging.getLogger("det_core.ipc")

Handler = Callable[[int, Any], None]
_DEPARTURE_DELAY = 0.02
"""Seconds for which the chief collects departures before it tells the workers of them."""


class Star(Membership):
    """The links of one rank, and what travels over them beside collectives.

    A star is made by :func:`det_core.ipc.connect`, which does the rendezvous. Arguments as for ``Membership``.
    """

    def __init__(
        self, *, rank: int, names: Sequence[int], timeout: float | None = None, bound: int = QUEUE_BOUND
    ) -> None:
        super().__init__(rank, names, timeout=timeout, bound=bound)
        self.closing = False
        """This rank says goodbye, or has."""
        self.closers: list[Callable[[], None]] = []
        """What else to close with the star, and (the second list) in a forked child."""
        self.abandoners: list[Callable[[], None]] = []
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the chief says that every rank is there."""
        self._mapper = Mapper()
        self._lanes: dict[str, Lane] = {}
        self._departed: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, str] = {}
        self._unannounced: dict[int, tuple[dict[str, Any], str | None]] = {}
        """On the chief, those of whom the other workers are still to be told."""
        self._handlers: dict[str, Handler] = {}
        self._kept: dict[str, list[tuple[int, Any]]] = {}
        self._kinds: dict[int, Callable[[Peer, Frame], object]] = {
            Kind.CALL: self._on_call,
            Kind.ENTERED: lambda _peer, frame: self.open_lane(frame.name).heard(frame),
            Kind.ASK: lambda peer, frame: peer.control.send(self.open_lane(frame.name).answer(frame)),
            Kind.ANSWER: lambda _peer, frame: self.open_lane(frame.name).answered(frame),
            Kind.POST: self._on_post,
            Kind.CREDIT: self._on_credit,
            Kind.TROUBLE: self._on_trouble_elsewhere,
            Kind.LEAVING: self._on_leaving,
            Kind.GOODBYE: self._on_goodbye,
            Kind.SEEN: lambda peer, _frame: self.on_seen(peer),
            Kind.DEPARTED: lambda _peer, frame: self._depart(pickle.loads(frame.segments[0])),
            Kind.READY: lambda _peer, _frame: self.on_ready(),
        }
        _stars.add(self)

    # for contexts

    def lane(self, name: str) -> Lane:
        """The collectives called ``name``, with a sequence of their own; any one thread may use a lane."""
        self._check_open()
        return self.open_lane(name)

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
            for rank, message in self._kept.pop(topic, []):
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
        data = encode(Kind.TROUBLE, rank=self.rank, body=Trouble("ended", f"{code}: {reason}").encode())
        for peer in self.others():
            peer.announce(data)

    def departed(self) -> Mapping[int, dict[str, Any]]:
        """The ranks that said goodbye, with the farewell each gave to ``close``."""
        return MappingProxyType(self._departed)

    def failures(self) -> Mapping[int, str]:
        """The ranks that said goodbye because of an error, with its text."""
        return MappingProxyType(self._failures)

    # for the rendezvous

    def new_link(self, sock: socket.socket) -> UnixLink:
        """A control link, whose queue the ipc thread sends on."""

        def arm(link: UnixLink, queued: bool) -> None:
            self.loop.modify(link.fd, select.EPOLLIN | (select.EPOLLOUT if queued else 0))

        return UnixLink(sock, arm)

    def new_data_link(self, sock: socket.socket, rank: int) -> UnixLink:
        """The user lane's own link: its queue is sent on by the ipc thread, its frames are read by callers."""

        def arm(link: UnixLink, queued: bool) -> None:
            if queued:
                self.loop.watch(link.fd, select.EPOLLOUT, lambda _events: self._flush_data(rank))
            else:
                self.loop.unwatch(link.fd)

        return UnixLink(sock, arm)

    def admit(self, peer: Peer) -> None:
        """Link up with ``peer``; on the ipc thread."""
        self.peers[peer.rank] = peer
        if isinstance(link := peer.control, UnixLink):
            self.loop.watch(link.fd, select.EPOLLIN, lambda _events: self._on_link(peer, link))
            if (pidfd := peer.watch_process()) is not None:
                self.loop.watch(pidfd, select.EPOLLIN, lambda _events: self._on_death(peer, link))
        if peer.data is not None:
            self.open_lane("user").attach(peer.data)

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Take in one control frame.

        Raises:
            BadFrame: of no kind that one who is in may send.
        """
        handler = self._kinds.get(frame.kind)
        if handler is None:
            raise BadFrame(f"kind {frame.kind}")
        handler(peer, frame)

    # on the ipc thread: the links

    def open_lane(self, name: str) -> Lane:
        """As ``lane``, also while the star closes: frames for it may still come."""
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = Lane(self, name, self._mapper)
            return lane

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
            self.break_off(Trouble("broken", f"{peer} sent what is no message ({e})"))
            self._drop(peer)
            return False
        if link.eof:
            self.gone(peer)
        return not (link.is_drained or link.eof)

    def _on_death(self, peer: Peer, link: UnixLink) -> None:
        """The process is dead; what it said before counts."""
        while not peer.dead and self._read(peer, link):
            pass
        self.gone(peer)

    # on the ipc thread: what arrives beside the user lane's frames

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        frame.owed = size_of(frame.segments)
        self.open_lane(frame.name).deliver(frame)

    def _on_post(self, _peer: Peer, frame: Frame) -> None:
        message = pickle.loads(frame.segments[0])
        handler = self._handlers.get(frame.name)
        if handler is None:
            self._kept.setdefault(frame.name, []).append((frame.rank, message))
        else:
            handler(frame.rank, message)

    def _on_credit(self, peer: Peer, frame: Frame) -> None:
        peer.credit(frame.number)
        self.wake_all()

    def _on_trouble_elsewhere(self, peer: Peer, frame: Frame) -> None:
        peer.acknowledge(self.rank)
        self.break_off(Trouble.decode(frame.segments[0]), peer)

    def _on_leaving(self, peer: Peer, _frame: Frame) -> None:
        peer.leaving = True
        peer.acknowledge(self.rank)

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        farewell, peer.failure = pickle.loads(frame.segments[0])
        self._depart({peer.rank: (farewell, peer.failure)})
        peer.departed = True
        self.departures += 1
        peer.acknowledge(self.rank)
        if self.rank == 0:
            with self._lock:
                if not self._unannounced:
                    self.loop.call_later(_DEPARTURE_DELAY, self._announce_departures)
                self._unannounced[peer.rank] = farewell, peer.failure
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
        self._departed = {**self._departed, **{rank: farewell for rank, (farewell, _) in more.items()}}

    # the end

    def close(self, *, farewell: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
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
        body = pickle.dumps((dict(farewell or {}), text), protocol=5)
        try:
            self._announce_departures()
            self._let_go_of(lambda peer: not peer.queued)
            for peer in list(self.peers.values()):  # also to a chief that has closed, or it would take this for a death
                if not peer.dead:
                    peer.announce(encode(Kind.GOODBYE, rank=self.rank, body=body))
            # A goodbye is acknowledged before TCP is closed, else a reset may eat it.
            self._let_go_of(lambda peer: peer.informed)
        finally:
            ended = self.loop.stop()  # first, as its handlers may still post an answer to what has come meanwhile
            self.trouble = Trouble("closed", "this DistributedContext is closed")
            self.wake_all()
            if ended:
                for lane in self._lanes.values():
                    lane.close()
                for peer in self.peers.values():
                    peer.close()
                for close in self.closers:
                    close()
                _stars.discard(self)

    def _let_go_of(self, has: Callable[[Peer], bool]) -> None:
        """Wait until every peer has what was sent to it; not for long in a job that is broken anyway."""
        broken_at: float | None = None

        def done() -> bool:
            nonlocal broken_at
            if self.trouble is not None:
                broken_at = broken_at or monotonic()
            given_up = broken_at is not None and monotonic() - broken_at > TOLD_WITHIN
            return given_up or not self.loop.thread.is_alive() or all(has(p) for p in self.others())

        def whom() -> str:
            return some_of([p for p in self.others() if not has(p)], str) + " to take what was sent to it"

        pause = 0.0005
        for seconds in waiting(done, self.me, lambda: "close()", whom):
            time.sleep(min(seconds, pause))
            pause *= 2

    def leave(self) -> None:
        """The process exits and nobody has closed the star: tell the others what that was, and see that they hear."""
        if self.closing:
            return
        for peer in self.others():
            peer.announce(encode(Kind.LEAVING, rank=self.rank))
        until = monotonic() + TOLD_WITHIN
        while not all(peer.informed for peer in self.others()) and monotonic() < until:
            time.sleep(0.002)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors, without a word to anybody."""
        self.closing = True
        self.trouble = Trouble("closed", "this DistributedContext belongs to the process that this one was forked from")
        self.loop.close()
        for lane in self._lanes.values():
            lane.abandon()
        for peer in self.peers.values():
            peer.close()
        for abandon in self.abandoners:
            abandon()

    def _check_open(self) -> None:
        if self.trouble is not None and self.trouble.kind == "closed":
            raise self.trouble.error()


_stars: weakref.WeakSet[Star] = weakref.WeakSet()
"""Every open star of this process: what a fork and the end of the process have to reach."""


def _abandon_all() -> None:
    for star in list(_stars):
        star.abandon()
    _stars.clear()


def _leave_all() -> None:
    for star in list(_stars):
        star.leave()


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_leave_all)
