"""Collectives: gather, allgather, broadcast, barrier, on a sequence of calls of their own.

The ``user`` lane has sockets of its own, which the calling thread reads itself: no other thread wakes up for a
collective. All other lanes, and all links between machines, are read by the ipc thread, which hands the frames over.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from det_core._clock import monotonic
from det_core.ipc._frames import BadFrame, Call, Frame, Kind, Op, SmallFrameEncoder, encode
from det_core.ipc._membership import AbortReason, Membership, Peer, some_of, wait_loop
from det_core.ipc._serialization import OUT_OF_BAND_BYTES, Mapper, Packet, Segment, dump, join_items, split_items
from det_core.ipc._unix_link import UnixLink

_HINT_AFTER = 0.01
"""Seconds a worker waits before it tells the chief where: so that a disagreement is seen although nobody answers."""
_OPS = tuple(Op)
_CLOSE_TIMEOUT = 5.0
"""Seconds that closing waits for the call of another thread to notice."""
_ANSWER_TTL = 0.1
"""Seconds for which the chief gives the same answer to each worker that asks for whom it waits."""
_NOTHING = (b"",)
"""The answer to a gather."""


class _Wait(NamedTuple):
    """What a call waits for, and for how long."""

    ready: Callable[[], object]
    call: Call
    timeout: float | None
    needs: Sequence[Peer]
    """The peers without whom it cannot become ready."""
    waiting_for: Callable[[], str]
    """For messages: for whom it waits."""
    conflict: Callable[[], str] = lambda: ""
    """For messages: in which other call of its script one of those is."""


class Channel:
    """One sequence of collectives. Made by :meth:`Communicator.channel`; one call at a time, in turns."""

    def __init__(self, members: Membership, name: str, mapper: Mapper) -> None:
        self.name = name
        self._members = members
        self._mapper = mapper
        self._direct = name == "user"
        self._order = _CallOrder(name, members.calls.setdefault(name, {}))
        self._turn = threading.Lock()
        self._inbox = _Inbox()
        self._small_frames = SmallFrameEncoder(name, members.rank)
        self._timed_out_call: Call | None = None
        self._chief_answer = ""
        self._chief_conflict = ""
        self._last_answer = (0, 0.0, ("", ""))
        members.wakers.append(self._inbox.wake)

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
        if self._members.rank:
            self._contribute(Op.gather, dump(obj), timeout)
            return None
        return self._load_all(self._collect(Op.gather, dump(obj), timeout), obj)

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """A list of every rank's object on every rank; arguments and errors as in :meth:`gather`."""
        segments = dump(obj)
        if self._members.rank:
            frame = self._contribute(Op.allgather, segments, timeout)
            return self._load_all(split_items(frame.segments), obj)
        return self._load_all(self._collect(Op.allgather, segments, timeout), obj)

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """The chief's object on every rank; the chief does not wait. Arguments and errors as in :meth:`gather`."""
        if self._members.rank:
            return self._mapper.load(self._contribute(Op.broadcast, None, timeout).segments)
        segments = dump(obj)
        with self._call_lock():
            call = self._enter(Op.broadcast)
            self._send(self._members.in_order(), call, segments, timeout)
        return obj

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Return once every rank has called this.

        Args:
            name: what messages on this rank call it.
            timeout: as in :meth:`gather`, and so are errors.
        """
        (self._contribute if self._members.rank else self._collect)(Op.barrier, dump(None), timeout, name)

    # the two sides of a call

    def _contribute(self, op: Op, segments: list[Segment] | None, timeout: float | None, label: str = "") -> Frame:
        """A worker's side: send the item, if there is one, and wait for the chief's answer."""
        members = self._members
        with self._call_lock():
            call = self._enter(op, label)
            chief = members.peers[0]
            if segments is not None:
                self._send((chief,), call, segments, timeout)
            pending = self._inbox.pending[0]
            self._wait(
                _Wait(pending.__len__, call, timeout, (chief,), self._waiting_for_chief, lambda: self._chief_conflict)
            )
            frame = pending.popleft()
            if frame.number != call.number:
                self._disagree(_CallMismatch({0: Call(self.name, _OPS[frame.op], frame.number), members.rank: call}))
        if frame.owed:
            chief.return_credit(frame, members.rank)
        return frame

    def _collect(self, op: Op, own: list[Segment], timeout: float | None, label: str = "") -> list[Sequence[Segment]]:
        """The chief's side of gather, allgather and barrier: wait for every item, then answer."""
        with self._call_lock():
            call = self._enter(op, label)
            peers = self._members.in_order()
            pending = [self._inbox.pending[p.rank] for p in peers]
            try:
                self._wait(_Wait(lambda: all(pending), call, timeout, peers, self._missing, self._conflict))
            except BaseException:
                self._timed_out_call = call
                raise
            frames = [queue.popleft() for queue in pending]
            items: list[Sequence[Segment]] = [own, *(f.segments for f in frames)]
            self._send(peers, call, join_items(items) if op is Op.allgather else _NOTHING, timeout)
        for peer, frame in zip(peers, frames, strict=True):
            if frame.owed:
                peer.return_credit(frame, 0)
        return items

    def _load_all(self, items: Sequence[Sequence[Segment]], own: Any) -> list[Any]:
        """Unpickle every rank's item but this rank's, which is taken as it is."""
        rank, load = self._members.rank, self._mapper.load
        return [own if r == rank else load(item) for r, item in enumerate(items)]

    def _call_lock(self) -> threading.Lock:
        """The lock to hold during a call. The trouble comes first: a forked child must not wait for the lock."""
        if self._members.abort_reason is not None:
            raise self._members.abort_reason.error()
        return self._turn

    def _enter(self, op: Op, label: str = "") -> Call:
        members = self._members
        if members.abort_reason is not None:
            raise members.abort_reason.error()
        if self._timed_out_call is not None:
            gave_up = f"{members.label} gave up {self._timed_out_call}, so no further call can follow on this channel"
            members.abort(AbortReason("mismatch", gave_up))
            members.raise_if_aborted()
        self._chief_answer = ""
        self._chief_conflict = ""
        try:
            call = self._order.enter(members.rank, op)
            return call._replace(label=label) if label else call
        except _CallMismatch as e:
            self._disagree(e)

    def _disagree(self, error: _CallMismatch) -> NoReturn:
        self._members.abort(AbortReason("mismatch", error.text(self._members.job_rank)))
        self._members.raise_if_aborted()
        raise AssertionError("a mismatch did not break the star")

    def _send(self, peers: Sequence[Peer], call: Call, segments: Sequence[Segment], timeout: float | None) -> None:
        """Send one frame to each of ``peers``, waiting where there is no room for it."""
        packet: Packet | None = None
        small: bytes | None = None
        if (
            self._direct
            and len(segments) == 1
            and isinstance(body := segments[0], bytes)
            and len(body) < OUT_OF_BAND_BYTES
        ):
            small = self._small_frames.encode(call.op, call.number, body)
        for peer in peers:
            if small is not None and peer.send_small(small):
                continue
            if packet is None:
                packet = Packet(call.op, self.name, self._members.rank, call.number, Kind.CALL, segments)
            self._wait_for_credit(peer, packet.size, call, timeout)
            if not peer.is_gone:
                peer.send_call(packet, direct=self._direct)

    def _wait_for_credit(self, peer: Peer, size: int, call: Call, timeout: float | None) -> None:
        def ready() -> bool:
            return peer.is_gone or peer.has_room(size)

        if not ready():
            self._wait(_Wait(ready, call, timeout, (), lambda: f"{peer} to read what is sent to it"))

    # waiting

    def _wait(self, wait: _Wait) -> None:
        """Take in frames until ``wait.ready``; every reason not to wait any longer raises."""
        members = self._members
        while not wait.ready():
            if members.abort_reason is not None:
                raise members.abort_reason.error()
            if members.departures and self._needs_departed(wait):
                continue
            if not self._take_arrived(_HINT_AFTER):
                break
        else:
            return
        self._notify_chief(Kind.ENTERED, wait.call)
        own_waits = members.waits.setdefault(members.rank, {})

        def ask() -> None:
            script_call = members.describe_call()
            own_waits[self.name] = wait.call.number, script_call
            self._notify_chief(Kind.ASK, wait.call, script_call)

        try:
            for seconds in wait_loop(
                wait.ready,
                members.label,
                lambda: wait.call,
                wait.waiting_for,
                timeout=members.timeout if wait.timeout is None else wait.timeout,
                check=members.raise_if_aborted,
                ask=ask,
                conflict=wait.conflict,
                interval=math.inf,  # what can end the wait wakes it
            ):
                if not (members.departures and self._needs_departed(wait)):
                    self._take_arrived(seconds)
        finally:
            own_waits.pop(self.name, None)

    def _notify_chief(self, kind: Kind, call: Call, script_call: str = "") -> None:
        """Tell the chief where this worker waits, or (ASK) have it answer for whom."""
        members = self._members
        if members.rank:
            body = script_call.encode()
            data = encode(kind, op=call.op, name=self.name, rank=members.rank, number=call.number, body=body)
            members.peers[0].control.send(data)

    def _needs_departed(self, wait: _Wait) -> bool:
        """Raise if the call needs a rank that has said goodbye; whether it turned out to be ready."""
        pending = self._inbox.pending
        is_gone = [p for p in wait.needs if p.departed and not pending[p.rank]]
        if not is_gone:
            return False
        while self._take_arrived(0.0):  # what was sent before the goodbye counts
            pass
        is_gone = [p for p in is_gone if not pending[p.rank]]
        if is_gone and not wait.ready():
            self._members.abort_lost(is_gone[0])
            self._members.raise_if_aborted()
        return True

    def _take_arrived(self, seconds: float) -> bool:
        """Wait until something happens, and take in what has arrived; whether anything happened."""
        try:
            frames = self._inbox.arrivals(seconds)
            for frame in frames or ():
                if frame.kind != Kind.CALL or not 0 < frame.op < len(_OPS):
                    raise BadFrame(f"rank {frame.rank} sent a frame of kind {frame.kind} on channel {self.name!r}")
                if self._order.observe(frame.rank, _OPS[frame.op], frame.number):
                    self._inbox.pending[frame.rank].append(frame)
                elif frame.owed:
                    self._members.peers[frame.rank].return_credit(frame, self._members.rank)
        except _CallMismatch as e:
            self._disagree(e)
        except BadFrame as e:
            self._members.abort(AbortReason("broken", str(e)))
            return True
        return frames is not None

    # for whom: the chief knows, and a worker asks it

    def _missing(self) -> str:
        pending = self._inbox.pending
        missing = [p for p in self._members.in_order() if not pending.get(p.rank)]
        return some_of(missing, self._named, "; ") or "nobody"

    def _conflict(self) -> str:
        """On the chief: say which missing rank waits in another call of its script than this rank."""
        members = self._members
        for peer in members.in_order():
            if not self._inbox.pending.get(peer.rank):
                there = members.wait_elsewhere(peer.rank, self.name)
                if text := self._conflict_with(peer.rank, there, self._script_call(members.rank)):
                    return text
        return ""

    def _conflict_with(self, rank: int, there: str, here: str) -> str:
        """Say that ``rank`` is in the call ``there``, this rank in ``here``; "" where that is one or not known."""
        members = self._members
        if not there or not here or there == here:
            return ""
        return f"rank {members.job_rank(rank)} is in {there}, {members.label} in {here}: every rank has to call it"

    def _script_call(self, rank: int) -> str:
        """Return what the script of ``rank`` calls to wait on this channel."""
        _, script_call = self._members.waits.get(rank, {}).get(self.name, (0, ""))
        return script_call

    def _waiting_for_chief(self) -> str:
        return self._chief_answer or self._named(self._members.peers[0])

    def _named(self, peer: Peer) -> str:
        return f"{peer}, last call heard of: {self._members.last_call(peer.rank, self.name)}"

    # called by the star, on the ipc thread

    def attach(self, link: UnixLink) -> None:
        """Read this link in the calling thread."""
        self._inbox.attach(link)

    def deliver(self, frame: Frame) -> None:
        """Hand over a frame that the ipc thread has read."""
        self._inbox.deliver(frame)

    def on_entered(self, frame: Frame) -> None:
        """A worker says in which call it waits."""
        try:
            self._order.observe(frame.rank, _OPS[frame.op], frame.number)
        except _CallMismatch as e:
            self._members.abort(AbortReason("mismatch", e.text(self._members.job_rank)))

    def answer(self, asked: Frame) -> bytes:
        """On the chief: for whom the call of a worker waits, empty where it is the chief itself."""
        script_call = bytes(asked.segments[0]).decode()
        self._members.waits.setdefault(asked.rank, {})[self.name] = asked.number, script_call
        if self._order.number > asked.number or (self._order.number == asked.number and asked.op == Op.broadcast):
            answer = "", ""  # the chief waits for nobody in it, and has sent what this worker waits for
        elif self._order.number == asked.number:
            number, until, answer = self._last_answer
            if number != asked.number or monotonic() >= until:  # each of a thousand workers asks, at the same moment
                answer = self._missing(), self._conflict()
                self._last_answer = asked.number, monotonic() + _ANSWER_TTL, answer
        else:
            here = self._members.wait_elsewhere(self._members.rank, self.name)
            answer = "", self._conflict_with(asked.rank, script_call, here)
        return encode(Kind.ANSWER, name=self.name, number=asked.number, body=json.dumps(answer).encode())

    def answered(self, frame: Frame) -> None:
        """On a worker: the chief's answer."""
        if frame.number == self._order.number:
            self._chief_answer, self._chief_conflict = json.loads(bytes(frame.segments[0]))

    def close(self) -> None:
        """Close the lane's own descriptors, once the call that may be under way has ended (the star is broken off)."""
        if self._turn.acquire(timeout=_CLOSE_TIMEOUT):
            self._inbox.close()
            self._turn.release()

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child."""
        self._inbox.close_in_child()


class _CallMismatch(Exception):
    """Two ranks made different calls of the same number."""

    def __init__(self, calls: dict[int, Call]) -> None:
        self._calls = calls
        super().__init__(calls)

    def text(self, name: Callable[[int], int]) -> str:
        """Who called what, for people; ``name`` gives a rank's number in the job."""
        said = ", ".join(f"rank {name(rank)} called {call}" for rank, call in sorted(self._calls.items()))
        return f"the ranks disagree: {said}. Every rank must make the same collective calls in the same order"


class _CallOrder:
    """Who called what on one lane: finds out that ranks disagree.

    Every rank makes the same calls in the same order, so the n-th call has one name. A roll remembers the first name
    heard for each number that is not over yet, and says so when somebody calls it differently. Thread-safe without a
    lock: each method is one atomic dictionary operation deep.

    Args:
        last: where to note the last call of each rank.
    """

    def __init__(self, channel: str, last: dict[int, tuple[Op, int]]) -> None:
        self.number = 0
        """The last call made here."""
        self._lane = channel
        self._last = last
        self._first_calls: dict[int, tuple[Op, int]] = {}

    def enter(self, rank: int, op: Op) -> Call:
        """This rank, ``rank``, makes its next call.

        Raises:
            _Disagreement: another rank is known to call something else with that number.
        """
        number = self.number + 1
        self._first_calls.pop(self.number, None)
        self.number = number
        self._note(rank, op, number)
        return Call(self._lane, op, number)

    def observe(self, rank: int, op: Op, number: int) -> bool:
        """Rank ``rank`` has made (or answered) the call ``number``.

        Returns:
            Whether it is about the call under way here or a later one; False: that call is over here.

        Raises:
            _Disagreement: it is not what others called with that number.
        """
        if number < self.number:
            return False
        self._note(rank, op, number)
        return True

    def _note(self, rank: int, op: Op, number: int) -> None:
        self._last[rank] = (op, number)
        said, first = self._first_calls.setdefault(number, (op, rank))
        if said is not op:
            raise _CallMismatch({first: Call(self._lane, said, number), rank: Call(self._lane, op, number)})


class _Inbox:
    """Where the frames of one lane arrive, from sockets that its caller reads or handed over by the ipc thread.

    Read by one thread, the lane's caller; ``deliver`` and ``wake`` by any.
    """

    def __init__(self) -> None:
        self.pending: dict[int, deque[Frame]] = defaultdict(deque)
        """By rank, what the caller has taken in and not used yet."""
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._delivered: deque[Frame] = deque()
        self._links: dict[int, UnixLink] = {}
        self._lock = threading.Lock()

    def attach(self, link: UnixLink) -> None:
        """Read this link too, in the calling thread."""
        self._links[link.fd] = link
        self._poll.register(link.fd, select.EPOLLIN)

    def deliver(self, frame: Frame) -> None:
        """Hand over a frame that the ipc thread has read."""
        self._delivered.append(frame)
        self.wake()

    def wake(self) -> None:
        """Have a waiting caller look again."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def arrivals(self, seconds: float) -> list[Frame] | None:
        """Wait until something happens; the frames that have arrived, or None when nothing has happened in time.

        Raises:
            BadFrame: what arrived is no frame.
        """
        events = self._poll.poll(seconds)
        if not events:
            return None
        frames: list[Frame] = []
        for fd, _ in events:
            if fd == self._wake:
                os.eventfd_read(fd)
                while self._delivered:
                    frames.append(self._delivered.popleft())
                continue
            link = self._links[fd]
            frames += link.receive()
            if link.eof:
                self._poll.unregister(fd)
        return frames

    def close(self) -> None:
        """Close the inlet's own descriptors; no caller may be in ``arrivals`` any more."""
        with self._lock:
            if self._wake >= 0:
                self._poll.close()
                os.close(self._wake)
                self._wake = -1

    def close_in_child(self) -> None:
        """As ``close``, in a forked child, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self.close()
