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
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from det_core.ipc._control import Control
from det_core.ipc._frames import Kind, encode
from det_core.ipc._lane import Lane
from det_core.ipc._liveness import Patience
from det_core.ipc._loop import Loop
from det_core.ipc._payload import Mapper
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
        self._lanes: dict[str, Lane] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._sharers: list[Star] = []
        self._lock = threading.RLock()
        self._stirred = threading.Event()
        self._room_waiters = 0
        self.closing = False
        """This rank says goodbye, or has."""
        self._breaking = False
        self._published = threading.Event()
        self._ordered: tuple[Peer, ...] = ()
        self.closers: list[Callable[[], None]] = []
        """What else to close with the star, and (the second list) in a forked child."""
        self.abandoners: list[Callable[[], None]] = []
        self.control = Control(self)
        _stars.add(self)
        self.loop.start()

    # for contexts

    def lane(self, name: str) -> Lane:
        """The collectives called ``name``, with a sequence of their own; any one thread may use a lane."""
        self._check_usable()
        return self.open_lane(name)

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
        self.call_soon(lambda: self.control.subscribe(topic, handler))

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
        return MappingProxyType(self.control.departed)

    def failures(self) -> Mapping[int, str]:
        """The ranks that said goodbye because of an error, with its text."""
        return MappingProxyType(self.control.failures)

    # for lanes

    def name(self, rank: int) -> int:
        """The number in the job of this star's ``rank``."""
        return self._names[rank]

    def others(self, *, gone: bool = False) -> list[Peer]:
        """The peers that are still there; with ``gone``, those that said goodbye instead."""
        return [p for p in list(self.peers.values()) if (p.departed if gone else not p.gone)]

    def in_order(self) -> Sequence[Peer]:
        """All peers, by rank."""
        if len(self._ordered) != len(self.peers):
            self._ordered = tuple(self.peers[rank] for rank in sorted(self.peers))
        return self._ordered

    @contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """While a sender waits for room, it is woken up when there is some."""
        with self._lock:
            self._room_waiters += 1
        try:
            yield
        finally:
            with self._lock:
                self._room_waiters -= 1

    def mismatch(self, text: str) -> None:
        """The ranks disagree about their calls: nobody can go on."""
        self.break_off(Trouble("mismatch", text))

    def broken(self, text: str) -> None:
        """The protocol was broken: nobody can go on."""
        self.break_off(Trouble("broken", text))

    def lost(self, peer: Peer) -> None:
        """A rank that is needed is not there any more."""
        last = self.last_call(peer.rank)
        if peer.departed:
            what = "has closed its context" + (f" after {peer.failure}" if peer.failure else "")
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

    def stir(self) -> None:
        """There is more room to some peer: have those who wait for that look again."""
        self._stirred.set()
        if self._room_waiters:
            self.wake_all()

    def wake_all(self) -> None:
        """Have everybody who waits look again."""
        self._stirred.set()
        for lane in list(self._lanes.values()):
            lane.wake()

    def _on_crash(self, error: BaseException) -> None:
        text = f"the ipc thread of rank {self.name(self.rank)} ended: {type(error).__name__}: {error}"
        self.break_off(Trouble("broken", text))
        self._publish(Trouble("broken", text))

    # the rest

    def open_lane(self, name: str) -> Lane:
        """As ``lane``, also while the star closes: frames for it may still come."""
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = Lane(self, name, direct=name == "user")
            return lane

    def last_call(self, rank: int) -> str:
        """The last collectives heard of a rank, for messages."""
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
            self._wait_until(lambda: not any(p.queued for p in self.others()))
            for peer in list(self.peers.values()):  # also to a chief that has closed, or it would take this for a death
                if not peer.dead:
                    peer.tell(encode(Kind.GOODBYE, rank=self.rank, body=body))
            self._wait_until(lambda: all(p.goodbye_seen if p.remote else not p.queued for p in self.others()))
        finally:
            ended = self.loop.stop()  # first, as its handlers may still post an answer to what has come meanwhile
            self.trouble = Trouble("closed", "this DistributedContext is closed")
            self.wake_all()
            if ended:
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
        if not self.closing:
            for peer in self.others():
                peer.tell(encode(Kind.LEAVING, rank=self.rank))
            if any(peer.remote for peer in self.others()):
                time.sleep(_REMOTE_HEAD_START)

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
