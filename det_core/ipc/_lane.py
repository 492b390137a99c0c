"""Collectives: gather, allgather, broadcast, barrier, on a sequence of calls of their own.

The ``user`` lane has sockets of its own, which the calling thread reads itself: no other thread wakes up for a
collective. All other lanes, and all links between machines, are read by the ipc thread, which hands the frames over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from det_core.errors import CollectiveTimeout
from det_core.ipc._frames import BadFrame, Call, Frame, Kind, Op, Stamp, encode
from det_core.ipc._inlet import Inlet
from det_core.ipc._link import UnixLink
from det_core.ipc._liveness import Patience
from det_core.ipc._matching import Disagreement, Roll
from det_core.ipc._payload import OUT_OF_BAND, Packet, Segment, dump, join_items, split_items

if TYPE_CHECKING:
    from det_core.ipc._peer import Peer
    from det_core.ipc._star import Star

_HINT_AFTER = 0.01
"""Seconds a worker waits before it tells the chief where: so that a disagreement is seen although nobody answers."""
_OPS = tuple(Op)
_LAST_CALL = 5.0
"""Seconds that closing waits for the call of another thread to notice."""
_NOTHING = (b"",)
"""The answer to a gather."""


class _Wait(NamedTuple):
    """What a call waits for, and for how long."""

    ready: Callable[[], object]
    call: Call
    timeout: float | None
    needs: Sequence[Peer]
    """The peers without whom it cannot become ready."""
    whom: Callable[[], str]
    """For messages: for whom it waits."""


class Lane:
    """One sequence of collectives. Made by :meth:`Star.lane`; one call at a time, further threads take turns."""

    def __init__(self, star: Star, name: str, *, direct: bool) -> None:
        self.name = name
        self.direct = direct
        self.roll = Roll(name)
        self._star = star
        self._turn = threading.Lock()
        self._inlet = Inlet()
        self._stamp = Stamp(name, star.rank)
        self._given_up: Call | None = None

    # the collectives

    def gather(self, obj: Any, *, timeout: float | None = None) -> list[Any] | None:
        """A list of every rank's object on the chief, None on the others, which wait until the chief has everything.

        Args:
            obj: anything that can be pickled.
            timeout: seconds after which to give up; None: the star's own, which is to wait while every rank lives.

        Raises:
            PeerLost: a rank died or closed; the message names it.
            CollectiveMismatch: a rank called something else.
            CollectiveTimeout: the deadline has passed.
            ContextClosed: the star is closed, or this is a forked child.
        """
        if self._star.rank:
            self._contribute(Op.gather, dump(obj), timeout)
            return None
        items = self._collect(Op.gather, dump(obj), timeout)
        return self._load_all(items, obj)

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """A list of every rank's object on every rank; arguments and errors as in :meth:`gather`."""
        segments = dump(obj)
        if self._star.rank:
            frame = self._contribute(Op.allgather, segments, timeout)
            return self._load_all(split_items(frame.segments), obj)
        items = self._collect(Op.allgather, segments, timeout)
        return self._load_all(items, obj)

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """The chief's object on every rank; the chief does not wait. Arguments and errors as in :meth:`gather`."""
        star = self._star
        if star.rank:
            frame = self._contribute(Op.broadcast, None, timeout)
            return star.mapper.load(frame.segments)
        segments = dump(obj)
        with self._my_turn():
            call = self._enter(Op.broadcast)
            self._send(star.in_order(), call, segments, timeout)
        return obj

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Return once every rank has called this.

        Args:
            name: what messages on this rank call it.
            timeout: as in :meth:`gather`, and so are errors.
        """
        (self._contribute if self._star.rank else self._collect)(Op.barrier, dump(None), timeout, name)

    # the two sides of a call

    def _contribute(self, op: Op, segments: list[Segment] | None, timeout: float | None, label: str = "") -> Frame:
        """A worker's side: send the item, if there is one, and wait for the chief's answer."""
        star = self._star
        with self._my_turn():
            call = self._enter(op, label)
            chief = star.peers[0]
            if segments is not None:
                self._send((chief,), call, segments, timeout)
            pending = self._inlet.waiting[0]
            self._wait(_Wait(pending.__len__, call, timeout, (chief,), self._waits_for_chief))
            frame = pending.popleft()
            if frame.number != call.number:
                self._disagree(Disagreement({0: Call(self.name, _OPS[frame.op], frame.number), star.rank: call}))
        if frame.owed:
            chief.used(frame, star.rank)
        return frame

    def _collect(self, op: Op, own: list[Segment], timeout: float | None, label: str = "") -> list[Sequence[Segment]]:
        """The chief's side of gather, allgather and barrier: wait for every item, then answer."""
        star = self._star
        with self._my_turn():
            call = self._enter(op, label)
            peers = star.in_order()
            pending = [self._inlet.waiting[p.rank] for p in peers]
            try:
                self._wait(_Wait(lambda: all(pending), call, timeout, peers, self._waits_for_workers))
            except BaseException:
                self._given_up = call
                raise
            frames = [queue.popleft() for queue in pending]
            items: list[Sequence[Segment]] = [own, *(f.segments for f in frames)]
            self._send(peers, call, join_items(items) if op is Op.allgather else _NOTHING, timeout)
        for peer, frame in zip(peers, frames, strict=True):
            if frame.owed:
                peer.used(frame, 0)
        return items

    def _load_all(self, items: Sequence[Sequence[Segment]], own: Any) -> list[Any]:
        """Unpickle every rank's item but this rank's, which is taken as it is."""
        rank, load_one = self._star.rank, self._star.mapper.load
        return [own if r == rank else load_one(item) for r, item in enumerate(items)]

    def _my_turn(self) -> threading.Lock:
        """The lock to hold during a call. The star comes first: a forked child must not wait for the lock."""
        if self._star.trouble is not None:
            raise self._star.trouble.error()
        return self._turn

    def _enter(self, op: Op, label: str = "") -> Call:
        star = self._star
        if star.trouble is not None:
            raise star.trouble.error()
        if self._given_up is not None:
            star.mismatch(f"rank {star.name(0)} gave up {self._given_up}, so no further call can follow on this lane")
        try:
            call = self.roll.enter(star.rank, op)
            return call._replace(label=label) if label else call
        except Disagreement as e:
            self._disagree(e)

    def _disagree(self, error: Disagreement) -> NoReturn:
        self._star.mismatch(error.text(self._star.name))
        self._star.raise_if_broken()
        raise AssertionError("a mismatch did not break the star")

    def _send(self, peers: Sequence[Peer], call: Call, segments: Sequence[Segment], timeout: float | None) -> None:
        """Send one frame to each of ``peers``, waiting where there is no room for it."""
        packet: Packet | None = None
        small: bytes | None = None
        if self.direct and len(segments) == 1 and isinstance(body := segments[0], bytes) and len(body) < OUT_OF_BAND:
            small = self._stamp.encode(Kind.CALL, call.op, call.number, body)
        for peer in peers:
            if small is not None and peer.data is not None and not peer.room.full(len(small)):
                if queued := peer.data.send(small):
                    peer.room.add(queued)
                continue
            if packet is None:
                packet = Packet(Kind.CALL, call.op, self.name, self._star.rank, call.number, segments)
            self._wait_for_room(peer, packet.size, call, timeout)
            if not peer.gone:
                peer.send_call(packet, direct=self.direct)

    def _wait_for_room(self, peer: Peer, size: int, call: Call, timeout: float | None) -> None:
        def ready() -> bool:
            return peer.gone or not peer.room.full(size)

        if not ready():
            with self._star.waiting_for_room():
                self._wait(_Wait(ready, call, timeout, (), lambda: f"{peer} does not read what is sent to it"))

    # waiting

    def _wait(self, wait: _Wait) -> None:
        """Take in frames until ``wait.ready``; every reason not to wait any longer raises."""
        star = self._star
        seconds = _HINT_AFTER
        patience: Patience | None = None
        while not wait.ready():
            if star.trouble is not None:
                raise star.trouble.error()
            if star.departures and self._needs_departed(wait):
                continue
            if self._take_arrived(seconds) and (patience is None or not patience.expired):
                continue
            if patience is None:
                limit = star.timeout if wait.timeout is None else wait.timeout
                patience = Patience(limit, lambda: self._complain(wait))
                self._say(Kind.ENTERED, wait.call)
            if patience.expired:
                raise CollectiveTimeout(f"{wait.call} took longer than {patience.waited:.1f} s: {wait.whom()}")
            seconds = patience.next(60.0)

    def _complain(self, wait: _Wait) -> str:
        """For the warning; a worker also asks the chief, whose answer is logged when it comes."""
        self._say(Kind.ASK, wait.call)
        return f"rank {self._star.name(self._star.rank)} is in {wait.call}; {wait.whom()}"

    def _say(self, kind: Kind, call: Call) -> None:
        """Tell the chief where this worker waits."""
        star = self._star
        if star.rank:
            star.peers[0].tell(encode(kind, op=call.op, name=self.name, rank=star.rank, number=call.number))

    def _needs_departed(self, wait: _Wait) -> bool:
        """Raise if the call needs a rank that has said goodbye; whether it turned out to be ready."""
        gone = [p for p in wait.needs if p.departed and not self._inlet.waiting[p.rank]]
        if not gone:
            return False
        while self._take_arrived(0.0):  # what was sent before the goodbye counts
            pass
        gone = [p for p in gone if not self._inlet.waiting[p.rank]]
        if gone and not wait.ready():
            self._star.lost(gone[0])
            self._star.raise_if_broken()
        return True

    def _take_arrived(self, seconds: float) -> bool:
        """Wait until something happens, and take in what has arrived; whether anything happened."""
        try:
            frames = self._inlet.arrivals(seconds)
            for frame in frames or ():
                self._take(frame)
        except Disagreement as e:
            self._disagree(e)
        except BadFrame as e:
            self._star.broken(str(e))
            return True
        return frames is not None

    def _take(self, frame: Frame) -> None:
        if frame.kind != Kind.CALL or not 0 < frame.op < len(_OPS):
            raise BadFrame(f"rank {frame.rank} sent a frame of kind {frame.kind} on lane {self.name!r}")
        if self.roll.hear(frame.rank, _OPS[frame.op], frame.number):
            self._inlet.waiting[frame.rank].append(frame)
        elif frame.owed:
            self._star.peers[frame.rank].used(frame, self._star.rank)

    def _waits_for_chief(self) -> str:
        return f"waits for the chief, {self._star.peers[0]}, whose last call heard of is {self.last_call(0)}"

    def _waits_for_workers(self) -> str:
        waiting = self._inlet.waiting
        missing = [p for p in self._star.in_order() if not waiting.get(p.rank)]
        said = "; ".join(f"{p}, last call heard of: {self.last_call(p.rank)}" for p in missing)
        return f"waits for {said or 'nobody'}"

    # called by the star, on the ipc thread

    def attach(self, link: UnixLink) -> None:
        """Read this link in the calling thread."""
        self._inlet.attach(link)

    def deliver(self, frame: Frame) -> None:
        """Hand over a frame that the ipc thread has read."""
        self._inlet.deliver(frame)

    def heard(self, frame: Frame) -> None:
        """A worker says in which call it waits."""
        try:
            self.roll.hear(frame.rank, _OPS[frame.op], frame.number)
        except Disagreement as e:
            self._star.mismatch(e.text(self._star.name))

    def describe(self) -> str:
        """What the chief does on this lane and for whom it waits."""
        mine = self.roll.last(self._star.rank)
        return f"rank {self._star.name(self._star.rank)} made {mine or 'no call yet'} and {self._waits_for_workers()}"

    def last_call(self, rank: int) -> str:
        """The last call of ``rank`` that is known here."""
        return str(self.roll.last(rank) or "none")

    def wake(self) -> None:
        """Have a waiting call look again."""
        self._inlet.wake()

    def close(self) -> None:
        """Close the lane's own descriptors, once the call that may be under way has ended (the star is broken off)."""
        if self._turn.acquire(timeout=_LAST_CALL):
            self._inlet.close()
            self._turn.release()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._inlet.abandon()
