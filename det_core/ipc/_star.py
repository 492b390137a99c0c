"""A star: the chief, rank 0, linked to every other rank.

Why not one ZMQ socket for everything: a ZMQ message between two processes of a machine passes through two I/O
threads, which costs two context switches a hop, copies large messages at each hop, and tells nothing about who died.
So ranks of one machine talk over unix sockets of our own; ZMQ carries the links between machines
(:mod:`det_core.ipc._remote`), for its CURVE encryption and heartbeats.

Threads: the ipc thread (:mod:`det_core.ipc._loop`) reads control links, watches peers and sends what was queued.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Frame, Kind, encode
from det_core.ipc._lane import Lane
from det_core.ipc._link import UnixLink
from det_core.ipc._liveness import Patience, open_pidfd
from det_core.ipc._loop import Loop
from det_core.ipc._payload import Mapper, MemoryFile
from det_core.ipc._peer import Handler, Peer
from det_core.ipc._trouble import Trouble

logger = logging.getLogger("det_core.ipc")
QUEUE_BOUND = 256 << 20
"""Bytes that may be on their way to one peer before a sender waits."""
_REMOTE_HEAD_START = 0.05
"""Seconds that ZMQ gets to tell other machines of trouble before this rank's own calls raise."""
_BROKEN_LINGER = 2.0
"""Seconds that ``close`` waits for the last control messages of a job that is broken anyway."""


class Star:
    """The links of one rank, and what travels over them beside collectives.

    A star is made by :func:`det_core.ipc.connect`, which does the rendezvous.

    Args:
        rank: this rank's number in the star.
        names: what people call each rank: its number in the job, which is another one in the star of a machine.
        timeout: default deadline of a collective in seconds; None: none.
        bound: bytes on their way to one peer before a sender waits.
    """

    def __init__(
        self, *, rank: int, names: Sequence[int], timeout: float | None = None, bound: int = QUEUE_BOUND
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self._names = names
        self.timeout = timeout
        self.bound = bound
        self.peers: dict[int, Peer] = {}
        """By rank: everybody on the chief, the chief on a worker."""
        self.mapper = Mapper()
        self.departures = 0
        """How many ranks have said goodbye to this one."""
        self.trouble: Trouble | None = None
        self.loop = Loop(f"det_core-ipc-{rank}", self._on_crash)
        self._departed: dict[int, dict[str, Any]] = {}
        self._lanes: dict[str, Lane] = {}
        self._handlers: dict[str, Handler] = {}
        self._kept: dict[str, list[tuple[int, Any]]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._sharers: list[Star] = []
        self._lock = threading.RLock()
        self._stirred = threading.Event()
        self._room_waiters = 0
        self._closing = self._breaking = False
        self._published = threading.Event()
        self._ordered: tuple[Peer, ...] = ()
        self.closers: list[Callable[[], None]] = []
        """What else to close with the star, and (the second list) in a forked child."""
        self.abandoners: list[Callable[[], None]] = []
        self._kinds: dict[int, Callable[[Peer, Frame], None]] = {
            Kind.CALL: self._on_call,
            Kind.ENTERED: lambda _, frame: self._lane(frame.name).heard(frame),
            Kind.POST: lambda _, frame: self._on_post(frame),
            Kind.CREDIT: self._on_credit,
            Kind.TROUBLE: lambda peer, frame: self.break_off(Trouble.decode(frame.segments[0]), peer),
            Kind.LEAVING: lambda peer, _: setattr(peer, "leaving", True),
            Kind.GOODBYE: self._on_goodbye,
            Kind.GOODBYE_SEEN: self._on_goodbye_seen,
            Kind.DEPARTED: self._on_departed,
            Kind.ASK: self._on_ask,
            Kind.ANSWER: self._on_answer,
            Kind.READY: lambda _peer, _frame: self._ready(),
            Kind.PROBE: lambda _peer, _frame: None,
        }
        self._ready: Callable[[], None] = lambda: None
        self._user = self._lane("user")
        _stars.add(self)
        self.loop.start()

    # for contexts

    def lane(self, name: str) -> Lane:
        """The collectives called ``name``, with a sequence of their own; any one thread may use a lane."""
        self._check_usable()
        return self._lane(name)

    def post(self, topic: str, message: Any, *, to: int | None = None) -> None:
        """Send ``message`` to the subscribers of ``topic``, in order, without waiting for anything.

        Args:
            to: on the chief the rank to send to, or None for all workers; a worker's post goes to the chief.
        """
        body = pickle.dumps(message, protocol=5)
        self._check_usable()
        data = encode(Kind.POST, name=topic, rank=self.rank, body=body)
        for peer in self.others():
            if to is None or self.rank or peer.rank == to:
                peer.tell(data)

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have ``handler(from_rank, message)`` called on the ipc thread for every message of ``topic``.

        Messages that came earlier were kept and are delivered now.
        """

        def deliver() -> None:
            self._handlers[topic] = handler
            for rank, message in self._kept.pop(topic, []):
                handler(rank, message)

        self.call_soon(deliver)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the ipc thread. May be called from a signal handler: it takes no lock."""
        self.loop.call_soon(fn)

    def raise_if_broken(self) -> None:
        """Raise what broke the job, if anything did.

        Raises:
            PeerLost, CollectiveMismatch: what broke it.
            SystemExit: another rank has ended the job.
            ContextClosed: the star is closed, or this is a forked child.
        """
        if self.trouble is not None:
            raise self.trouble.error()

    def on_trouble(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called on the ipc thread once the job is broken or ended; at once if it is already."""

        def add() -> None:
            self._callbacks.append(callback)
            if self.trouble is not None:
                callback()

        self.call_soon(add)

    def end_job(self, code: str, reason: str) -> None:
        """End the job on every other rank: their next calls raise ``SystemExit(0)``.

        Args:
            code: such as ``invalid_hp``.
            reason: for the logs.
        """
        self._check_usable()
        data = encode(Kind.TROUBLE, rank=self.rank, body=Trouble("ended", f"{code}: {reason}").encode())
        for peer in self.others():
            peer.tell(data)

    def departed(self) -> Mapping[int, dict[str, Any]]:
        """The ranks that said goodbye, with the farewell each gave to ``close``."""
        return MappingProxyType(self._departed)

    # for lanes

    def name(self, rank: int) -> int:
        """The number in the job of this star's ``rank``."""
        return self._names[rank]

    def others(self, *, gone: bool = False) -> list[Peer]:
        """The peers that are still there; with ``gone``, those that said goodbye instead."""
        return [p for p in self.peers.values() if (p.departed if gone else not p.gone)]

    def in_order(self) -> Sequence[Peer]:
        """All peers, by rank."""
        if len(self._ordered) != len(self.peers):
            self._ordered = tuple(self.peers[rank] for rank in sorted(self.peers))
        return self._ordered

    @contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """While a sender waits for room, it is woken up when there is some."""
        self._room_waiters += 1
        try:
            yield
        finally:
            self._room_waiters -= 1

    def mismatch(self, text: str) -> None:
        """The ranks disagree about their calls: nobody can go on."""
        self.break_off(Trouble("mismatch", text))

    def broken(self, text: str) -> None:
        """The protocol was broken: nobody can go on."""
        self.break_off(Trouble("broken", text))

    def lost(self, peer: Peer) -> None:
        """A rank that is needed is not there any more."""
        last = self._last_call(peer.rank)
        if peer.departed:
            what = "has closed its DistributedContext" + (f" after {peer.failure}" if peer.failure else "")
        elif peer.leaving:
            what = "exited without closing its DistributedContext"
        else:
            what = "died"
        self.break_off(Trouble("lost", f"{peer} {what}; the last call heard of it: {last}"), peer)

    def share_trouble(self, other: Star) -> None:
        """Have the trouble of this star be that of ``other`` too."""
        self._sharers.append(other)
        if self.trouble is not None:
            other.break_off(self.trouble, wait=False)

    def break_off(self, trouble: Trouble, heard_from: Peer | None = None, *, wait: bool = True) -> None:
        """Remember why the job cannot go on, tell the other ranks, and wake up every waiting call.

        The others are told first: this rank's script may exit as soon as it hears of it, and would take the reason
        with it. The first trouble is the one that counts.
        """
        with self._lock:
            first, self._breaking = not self._breaking, True
        if first:
            for star in self._sharers:
                star.break_off(trouble, wait=False)
            data = encode(Kind.TROUBLE, rank=self.rank, body=trouble.encode())
            told = [peer for peer in self.others() if peer is not heard_from]
            for peer in told:
                peer.tell(data)
            pause = _REMOTE_HEAD_START if any(peer.remote for peer in told) else 0.0
            self.call_soon(lambda: self.loop.call_later(pause, lambda: self._publish(trouble)))
        if wait and threading.current_thread() is not self.loop.thread:
            self._published.wait(_BROKEN_LINGER)

    def _publish(self, trouble: Trouble) -> None:
        if trouble.kind == "ended":
            logger.info("another rank has ended the job: %s", trouble.text)
        if self.trouble is None:
            self.trouble = trouble
        self._published.set()
        self.wake_all()
        for callback in self._callbacks:
            callback()

    def wake_all(self) -> None:
        """Have everybody who waits look again."""
        self._stirred.set()
        for lane in list(self._lanes.values()):
            lane.wake()

    # admission, by the rendezvous

    def admit(self, peer: Peer, control: UnixLink | None, pidfd: bool = True) -> None:
        """Link up with ``peer``; on the ipc thread, or before there is anybody to talk to."""
        peer.name = self.name(peer.rank)
        self.peers[peer.rank] = peer
        if control is not None:
            self.loop.watch(control.fd, select.EPOLLIN, lambda _events: self._read_control(peer, control))
            peer.pidfd = open_pidfd(peer.pid) if pidfd else None
            if peer.pidfd is not None:
                self.loop.watch(peer.pidfd, select.EPOLLIN, lambda _events: self._on_death(peer, control))
        if peer.data is not None:
            self._user.attach(peer.data)

    def on_ready(self, ready: Callable[[], None]) -> None:
        """Have ``ready()`` called when the chief says that every rank is there."""
        self._ready = ready

    def stranger_link(self, sock: socket.socket) -> UnixLink:
        """A link to somebody who has not said hello: takes little, and drops what the socket cannot take."""
        return UnixLink(sock, arm=lambda _link: None, disarm=lambda _link: None, limit=UNTRUSTED_LIMIT)

    def control_link(self, sock: socket.socket) -> UnixLink:
        """A link whose queue the ipc thread sends on."""
        return UnixLink(sock, arm=self._arm_control, disarm=self._disarm_control)

    def data_link(self, sock: socket.socket, rank: int) -> UnixLink:
        """The user lane's own link: its queue is sent on by the ipc thread, its frames are read by callers."""

        def arm(link: UnixLink) -> None:
            self.loop.watch(link.fd, select.EPOLLOUT, lambda _events: self._flush_data(rank))

        return UnixLink(sock, arm=arm, disarm=lambda link: self.loop.unwatch(link.fd))

    # on the ipc thread

    def _arm_control(self, link: UnixLink) -> None:
        self.loop.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    def _disarm_control(self, link: UnixLink) -> None:
        self.loop.modify(link.fd, select.EPOLLIN)

    def _flush_data(self, rank: int) -> None:
        self.peers[rank].flush_data()
        self._stir()

    def _read_control(self, peer: Peer, link: UnixLink) -> None:
        self._on_control(peer, link)

    def _on_control(self, peer: Peer, link: UnixLink) -> bool:
        """Read and flush; whether there was anything to read."""
        if link.queued:
            link.flush()
            self._stir()
        try:
            frames = link.receive()
            for frame in frames:
                self.dispatch(peer, frame)
        except BadFrame as e:
            self.broken(f"{peer} sent what is no message ({e})")
            self._drop(peer)
            return False
        if link.eof:
            self.gone(peer)
        return bool(frames)

    def _on_death(self, peer: Peer, link: UnixLink) -> None:
        """The process is dead; what it said before counts."""
        while not peer.dead and self._on_control(peer, link):
            pass
        self.gone(peer)

    def gone(self, peer: Peer) -> None:
        """The connection to a peer of another machine is gone."""
        if not peer.dead:
            self._drop(peer)
            if not peer.departed:
                self.lost(peer)

    def _drop(self, peer: Peer) -> None:
        """Nothing comes from ``peer`` any more and nothing goes to it."""
        peer.dead = True
        peer.control.kill()
        if isinstance(peer.control, UnixLink):
            self.loop.unwatch(peer.control.fd)
        if peer.data is not None:
            peer.data.kill()
        if peer.pidfd is not None:
            self.loop.unwatch(peer.pidfd)
        self.wake_all()

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Take in one control frame."""
        handler = self._kinds.get(frame.kind)
        if handler is None:
            raise BadFrame(f"kind {frame.kind}")
        handler(peer, frame)

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        frame.owed = sum(s.size if isinstance(s, MemoryFile) else memoryview(s).nbytes for s in frame.segments)
        self._lane(frame.name).deliver(frame)

    def _on_post(self, frame: Frame) -> None:
        message = pickle.loads(frame.segments[0])
        handler = self._handlers.get(frame.name)
        if handler is None:
            self._kept.setdefault(frame.name, []).append((frame.rank, message))
        else:
            handler(frame.rank, message)

    def _on_credit(self, peer: Peer, frame: Frame) -> None:
        peer.room.add(-frame.number)
        self._stir()

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        farewell, peer.failure = pickle.loads(frame.segments[0])
        self._depart({peer.rank: farewell})
        peer.departed = True
        self.departures += 1
        peer.tell(encode(Kind.GOODBYE_SEEN, rank=self.rank))
        if self.rank == 0:
            body = pickle.dumps({peer.rank: farewell}, protocol=5)
            for other in self.others():
                other.tell(encode(Kind.DEPARTED, body=body))
        self.wake_all()

    def _on_goodbye_seen(self, peer: Peer, _frame: Frame) -> None:
        peer.goodbye_seen = True
        self._stirred.set()

    def _on_departed(self, _peer: Peer, frame: Frame) -> None:
        self._depart(pickle.loads(frame.segments[0]))

    def _depart(self, more: dict[int, dict[str, Any]]) -> None:
        self._departed = {**self._departed, **more}

    def _on_ask(self, peer: Peer, frame: Frame) -> None:
        text = self._lane(frame.name).describe()
        peer.tell(encode(Kind.ANSWER, name=frame.name, body=text.encode()))

    def _on_answer(self, _peer: Peer, frame: Frame) -> None:
        logger.warning("waiting on lane %r: %s", frame.name, bytes(frame.segments[0]).decode())

    def _on_crash(self, error: BaseException) -> None:
        text = f"the ipc thread of rank {self.name(self.rank)} ended: {type(error).__name__}: {error}"
        self.break_off(Trouble("broken", text))
        self._publish(Trouble("broken", text))

    def _stir(self) -> None:
        self._stirred.set()
        if self._room_waiters:
            self.wake_all()

    # the rest

    def _lane(self, name: str) -> Lane:
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = Lane(self, name, direct=name == "user")
            return lane

    def _last_call(self, rank: int) -> str:
        calls = [lane.roll.last(rank) for lane in list(self._lanes.values())]
        return ", ".join(str(call) for call in calls if call is not None) or "none"

    def _check_usable(self) -> None:
        if self.trouble is not None and self.trouble.kind == "closed":
            raise self.trouble.error()

    # the end

    def close(self, *, farewell: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Say goodbye, once every living peer has what was sent to it, and let go of everything. Idempotent.

        Args:
            farewell: what the other ranks read in ``departed()``.
            failure: why this rank stops; part of the error of a rank whose later call needs this one.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        body = pickle.dumps((dict(farewell or {}), text), protocol=5)
        self._wait_until(lambda: not any(p.queued for p in self.others()))
        for peer in self.others():
            peer.tell(encode(Kind.GOODBYE, rank=self.rank, body=body))
        self._wait_until(lambda: all(p.goodbye_seen if p.remote else not p.queued for p in self.others()))
        with self._lock:
            if self.trouble is None or self.trouble.kind != "closed":
                self.trouble = Trouble("closed", "this DistributedContext is closed")
        self.wake_all()
        self.loop.stop()
        self._release()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        patience = Patience(
            None,
            lambda: (
                f"rank {self.name(self.rank)} closes, and has not got rid of what it sent to "
                + ", ".join(f"{p} ({p.queued} bytes)" for p in self.others() if p.queued)
            ),
        )
        while not done() and self.loop.thread.is_alive():
            if self.trouble is not None and patience.waited > _BROKEN_LINGER:
                return
            self._stirred.wait(patience.next(0.2))
            self._stirred.clear()

    def _release(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        for peer in self.peers.values():
            peer.close()
        for close in self.closers:
            close()
        _stars.discard(self)

    def leave(self) -> None:
        """The process exits and nobody has closed the star: tell the others what that was."""
        if not self._closing:
            for peer in self.others():
                peer.tell(encode(Kind.LEAVING, rank=self.rank))
            if any(peer.remote for peer in self.others()):
                time.sleep(_REMOTE_HEAD_START)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors, without a word to anybody."""
        self._closing = True
        self.trouble = Trouble("closed", "this DistributedContext belongs to the process that this one was forked from")
        self.loop.close()
        for lane in self._lanes.values():
            lane.close()
        for peer in self.peers.values():
            peer.close()
        for abandon in self.abandoners:
            abandon()


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
