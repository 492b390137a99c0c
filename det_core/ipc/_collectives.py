"""Collectives on a channel: gather, allgather, broadcast and barrier, in an independent sequence of calls.

The ``user`` channel has sockets of its own, which the calling thread reads, so no other thread wakes up for a
collective. All other channels, and all links between nodes, are read by the ipc thread, which delivers the frames.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from det_core._clock import monotonic
from det_core.ipc._frames import BadFrame, Call, Frame, Kind, Op, SmallFrameEncoder, encode
from det_core.ipc._inbox import Inbox
from det_core.ipc._membership import AbortReason, Membership, some_of
from det_core.ipc._peer import Peer
from det_core.ipc._serialization import OUT_OF_BAND_BYTES, Mapper, Packet, Segment, dump, join_items, split_items
from det_core.ipc._unix_link import UnixLink

_NOTIFY_AFTER = 0.01
"""Seconds of waiting after which a worker notifies the chief of its call: so mismatches show although no call ends."""
_OPS = tuple(Op)
_CLOSE_TIMEOUT = 5.0
"""Maximum wait in seconds of ``close`` for the call of another thread to end."""
_ANSWER_TTL = 0.1
"""Seconds for which the chief repeats one answer: after a warning is due, a thousand workers ask at the same moment."""
_EMPTY_RESULT = (b"",)
"""Result of a gather or a barrier for the workers."""


class _Wait(NamedTuple):
    """Condition that a call waits for, with its timeout and its messages."""

    ready: Callable[[], object]
    call: Call
    timeout: float | None
    required: Sequence[Peer]
    """Peers without which the condition cannot become true."""
    waiting_for: Callable[[], str]
    """Return the names of the ranks that are waited for."""
    conflict: Callable[[], str] = lambda: ""
    """Return the other call of its script in which one of them waits, or ""."""


class Channel:
    """One sequence of collectives, made by :meth:`Communicator.channel`. Calls of several threads run in turns."""

    def __init__(self, members: Membership, name: str, mapper: Mapper) -> None:
        self.name = name
        self._members = members
        self._mapper = mapper
        self._direct = name == "user"
        self._order = _CallOrder(name, members.calls.setdefault(name, {}))
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._small_frames = SmallFrameEncoder(name, members.rank)
        self._timed_out_call: Call | None = None
        """On the chief, the call that it gave up; its items may still arrive, so no other call can follow."""
        self._chief_answer = ""
        self._chief_conflict = ""
        self._last_answer = (0, 0.0, ("", ""))
        """On the chief, the number of the call, the time until which the answer counts, and the answer."""
        members.wakers.append(self._inbox.wake)

    # collectives

    def gather(self, obj: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Return a list of every rank's object on the chief, and None on the workers, which wait for the chief.

        Args:
            obj: any object that can be pickled.
            timeout: maximum wait in seconds. Defaults to that of the communicator; None there means to wait for as
                long as every rank lives.

        Raises:
            PeerLost: If a rank died or closed; the message names it.
            CollectiveMismatch: If a rank made a different call.
            CollectiveTimeout: At the deadline.
            ContextClosed: If the communicator is closed, or this is a forked child.
        """
        if self._members.rank:
            self._contribute(Op.gather, dump(obj), timeout)
            return None
        return self._load_all(self._collect(Op.gather, dump(obj), timeout), obj)

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return a list of every rank's object on every rank; arguments and errors as in :meth:`gather`."""
        segments = dump(obj)
        if self._members.rank:
            frame = self._contribute(Op.allgather, segments, timeout)
            return self._load_all(split_items(frame.segments), obj)
        return self._load_all(self._collect(Op.allgather, segments, timeout), obj)

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """Return the chief's object on every rank; the chief does not wait. Arguments and errors as in gather."""
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
            name: name of the barrier in the messages of this rank.
            timeout: as in :meth:`gather`, and so are the errors.
        """
        if self._members.rank:
            self._contribute(Op.barrier, dump(None), timeout, name)
        else:
            self._collect(Op.barrier, dump(None), timeout, name)

    # the two sides of a call

    def _contribute(self, op: Op, segments: list[Segment] | None, timeout: float | None, label: str = "") -> Frame:
        """Send a worker's item, if there is one, and return the chief's result."""
        members = self._members
        with self._call_lock():
            call = self._enter(op, label)
            chief = members.peers[0]
            if segments is not None:
                self._send((chief,), call, segments, timeout)
            results = self._inbox.pending[0]
            self._wait(
                _Wait(results.__len__, call, timeout, (chief,), self._waiting_for_chief, lambda: self._chief_conflict)
            )
            frame = results.popleft()
            if frame.number != call.number:
                self._raise_mismatch(
                    _CallMismatch({0: Call(self.name, _OPS[frame.op], frame.number), members.rank: call})
                )
        if frame.credit:
            chief.return_credit(frame, members.rank)
        return frame

    def _collect(self, op: Op, own: list[Segment], timeout: float | None, label: str = "") -> list[Sequence[Segment]]:
        """Collect all items on the chief, send the result, and return the items."""
        with self._call_lock():
            call = self._enter(op, label)
            peers = self._members.in_order()
            pending = [self._inbox.pending[peer.rank] for peer in peers]
            try:
                self._wait(
                    _Wait(lambda: all(pending), call, timeout, peers, self._describe_missing, self._find_conflict)
                )
            except BaseException:
                self._timed_out_call = call
                raise
            frames = [queue.popleft() for queue in pending]
            items: list[Sequence[Segment]] = [own, *(frame.segments for frame in frames)]
            if op is Op.allgather:
                self._send(peers, call, join_items(items), timeout)
            else:
                self._send(peers, call, _EMPTY_RESULT, timeout)
        for peer, frame in zip(peers, frames, strict=True):
            if frame.credit:
                peer.return_credit(frame, 0)
        return items

    def _load_all(self, items: Sequence[Sequence[Segment]], own: Any) -> list[Any]:
        """Unpickle the items of all ranks except this one's, which is ``own``."""
        load = self._mapper.load
        own_rank = self._members.rank
        return [own if rank == own_rank else load(item) for rank, item in enumerate(items)]

    def _call_lock(self) -> threading.Lock:
        """Return the lock of a call."""
        # In a forked child the lock may be held forever, so the abort reason, which is set there, comes first.
        self._members.raise_if_aborted()
        return self._lock

    def _enter(self, op: Op, label: str = "") -> Call:
        members = self._members
        members.raise_if_aborted()
        if self._timed_out_call is not None:
            text = f"{members.label} gave up {self._timed_out_call}, so no further call can follow on this channel"
            members.abort(AbortReason("mismatch", text))
            members.raise_if_aborted()
        self._chief_answer = ""
        self._chief_conflict = ""
        try:
            call = self._order.enter(members.rank, op)
        except _CallMismatch as e:
            self._raise_mismatch(e)
        if label:
            return call._replace(label=label)
        return call

    def _raise_mismatch(self, error: _CallMismatch) -> NoReturn:
        self._members.abort(AbortReason("mismatch", error.describe(self._members.job_rank)))
        self._members.raise_if_aborted()
        raise AssertionError("a mismatch did not abort the communicator")

    def _send(self, peers: Sequence[Peer], call: Call, segments: Sequence[Segment], timeout: float | None) -> None:
        """Send one frame to each of ``peers``, after waiting for credit."""
        packet: Packet | None = None
        small: bytes | None = None
        if self._direct and len(segments) == 1:
            body = segments[0]
            if isinstance(body, bytes) and len(body) < OUT_OF_BAND_BYTES:
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
            return peer.is_gone or peer.has_credit(size)

        if not ready():
            self._wait(_Wait(ready, call, timeout, (), lambda: f"{peer} to receive its messages"))

    # waiting

    def _wait(self, wait: _Wait) -> None:
        """Receive frames until ``wait.ready()``; raise if that cannot become true, or at the deadline."""
        members = self._members
        while not wait.ready():
            members.raise_if_aborted()
            if members.departures and self._check_departed(wait):
                continue
            if not self._receive(_NOTIFY_AFTER):
                break
        else:
            return
        self._notify_chief(Kind.ENTERED, wait.call)
        own_waits = members.waits.setdefault(members.rank, {})

        def refresh() -> None:
            script_call = members.describe_call()
            own_waits[self.name] = (wait.call.number, script_call)
            self._notify_chief(Kind.ASK, wait.call, script_call)

        timeout = wait.timeout
        if timeout is None:
            timeout = members.timeout
        try:
            for seconds in members.wait_loop(
                wait.ready,
                lambda: wait.call,
                wait.waiting_for,
                timeout=timeout,
                check=members.raise_if_aborted,
                refresh=refresh,
                conflict=wait.conflict,
                interval=math.inf,  # every event that can end the wait wakes it
            ):
                if not (members.departures and self._check_departed(wait)):
                    self._receive(seconds)
        finally:
            own_waits.pop(self.name, None)

    def _notify_chief(self, kind: Kind, call: Call, script_call: str = "") -> None:
        """Notify the chief that this worker waits in ``call``, or (ASK) ask which ranks it waits for."""
        members = self._members
        if members.rank:
            body = script_call.encode()
            data = encode(kind, op=call.op, name=self.name, rank=members.rank, number=call.number, body=body)
            members.peers[0].control.send(data)

    def _check_departed(self, wait: _Wait) -> bool:
        """Raise if the call requires a rank that has departed; return whether a required one has, with its item here.

        The caller then checks its condition again.
        """
        pending = self._inbox.pending
        departed = [peer for peer in wait.required if peer.departed and not pending[peer.rank]]
        if not departed:
            return False
        # Its goodbye came over the control link; the item that it sent before may be unread on the data link.
        while self._receive(0.0):
            pass
        departed = [peer for peer in departed if not pending[peer.rank]]
        if departed and not wait.ready():
            self._members.abort_lost(departed[0])
            self._members.raise_if_aborted()
        return True

    def _receive(self, seconds: float) -> bool:
        """Wait for frames or a wakeup, and handle the frames; return whether there was either within the time."""
        try:
            frames = self._inbox.receive(seconds)
            for frame in frames or ():
                if frame.kind != Kind.CALL or not 0 < frame.op < len(_OPS):
                    raise BadFrame(f"rank {frame.rank} sent a frame of kind {frame.kind} on channel {self.name!r}")
                if self._order.observe(frame.rank, _OPS[frame.op], frame.number):
                    self._inbox.pending[frame.rank].append(frame)
                elif frame.credit:
                    self._members.peers[frame.rank].return_credit(frame, self._members.rank)
        except _CallMismatch as e:
            self._raise_mismatch(e)
        except BadFrame as e:
            self._members.abort(AbortReason("broken", str(e)))
            return True
        return frames is not None

    # messages: the chief knows which ranks are missing, and a worker asks it

    def _describe_missing(self) -> str:
        pending = self._inbox.pending
        missing = [peer for peer in self._members.in_order() if not pending.get(peer.rank)]
        return some_of(missing, self._describe, "; ") or "nobody"

    def _find_conflict(self) -> str:
        """On the chief, return the other call of its script in which a missing rank waits, or ""."""
        members = self._members
        for peer in members.in_order():
            if not self._inbox.pending.get(peer.rank):
                elsewhere = members.wait_elsewhere(peer.rank, self.name)
                if text := self._describe_conflict(peer.rank, elsewhere, self._script_call(members.rank)):
                    return text
        return ""

    def _describe_conflict(self, rank: int, its_call: str, own_call: str) -> str:
        """Describe the two calls, or return "" if they are one, or one of them is unknown."""
        members = self._members
        if not its_call or not own_call or its_call == own_call:
            return ""
        return (
            f"rank {members.job_rank(rank)} is in {its_call}, {members.label} in {own_call}: every rank has to call it"
        )

    def _script_call(self, rank: int) -> str:
        """Return the script's call in which ``rank`` waits on this channel."""
        _, script_call = self._members.waits.get(rank, {}).get(self.name, (0, ""))
        return script_call

    def _waiting_for_chief(self) -> str:
        return self._chief_answer or self._describe(self._members.peers[0])

    def _describe(self, peer: Peer) -> str:
        return f"{peer}, last known call: {self._members.last_call(peer.rank, self.name)}"

    # called by the communicator, on the ipc thread

    def attach(self, link: UnixLink) -> None:
        """Receive from this link, too, in the calling thread."""
        self._inbox.attach(link)

    def deliver(self, frame: Frame) -> None:
        """Pass on a frame that the ipc thread has received."""
        self._inbox.deliver(frame)

    def on_entered(self, frame: Frame) -> None:
        """Check the call in which a worker waits against those of the other ranks."""
        try:
            self._order.observe(frame.rank, _OPS[frame.op], frame.number)
        except _CallMismatch as e:
            self._members.abort(AbortReason("mismatch", e.describe(self._members.job_rank)))

    def answer(self, request: Frame) -> bytes:
        """On the chief, return the answer to an ASK: the missing ranks and a conflict, each "" if there is none."""
        script_call = bytes(request.segments[0]).decode()
        self._members.waits.setdefault(request.rank, {})[self.name] = (request.number, script_call)
        current = self._order.number
        answer = ("", "")
        if current < request.number:
            own_call = self._members.wait_elsewhere(self._members.rank, self.name)
            answer = ("", self._describe_conflict(request.rank, script_call, own_call))
        elif current == request.number and request.op != Op.broadcast:
            number, until, answer = self._last_answer
            if number != request.number or monotonic() >= until:
                answer = (self._describe_missing(), self._find_conflict())
                self._last_answer = (request.number, monotonic() + _ANSWER_TTL, answer)
        # Otherwise the chief has sent the result, and the worker waits for that alone.
        return encode(Kind.ANSWER, name=self.name, number=request.number, body=json.dumps(answer).encode())

    def on_answer(self, frame: Frame) -> None:
        """On a worker, record the chief's answer."""
        if frame.number == self._order.number:
            self._chief_answer, self._chief_conflict = json.loads(bytes(frame.segments[0]))

    def close(self) -> None:
        """Close the channel's own descriptors after the current call, which the closed communicator ends."""
        if self._lock.acquire(timeout=_CLOSE_TIMEOUT):
            self._inbox.close()
            self._lock.release()

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child."""
        self._inbox.close_in_child()


class _CallMismatch(Exception):
    """Different calls of two ranks with the same number."""

    def __init__(self, calls: dict[int, Call]) -> None:
        self._calls = calls
        super().__init__(calls)

    def describe(self, job_rank: Callable[[int], int]) -> str:
        """Return the message; ``job_rank`` returns the number of a rank in the job."""
        calls = ", ".join(f"rank {job_rank(rank)} called {call}" for rank, call in sorted(self._calls.items()))
        return f"collective mismatch: {calls}; every rank must make the same collective calls in the same order"


class _CallOrder:
    """Order of the calls on one channel, which detects ranks whose calls differ.

    Every rank makes the same calls in the same order, so the n-th call has one operation. The first one that is known
    of each number is kept until the call is over here. Thread-safe without a lock: each method changes shared state by
    single, atomic dictionary operations.

    Args:
        channel: name of the channel.
        last: dictionary for the last known call of each rank.
    """

    def __init__(self, channel: str, last: dict[int, tuple[Op, int]]) -> None:
        self.number = 0
        """Number of the last call of this rank."""
        self._channel = channel
        self._last = last
        self._first: dict[int, tuple[Op, int]] = {}

    def enter(self, rank: int, op: Op) -> Call:
        """Return the next call of this rank.

        Raises:
            _CallMismatch: If another rank made a different call of this number.
        """
        number = self.number + 1
        self._first.pop(self.number, None)
        self.number = number
        self._check(rank, op, number)
        return Call(self._channel, op, number)

    def observe(self, rank: int, op: Op, number: int) -> bool:
        """Record that a rank has made the call ``number``, and return whether it is not over here.

        Raises:
            _CallMismatch: If another rank made a different call of this number.
        """
        if number < self.number:
            return False
        self._check(rank, op, number)
        return True

    def _check(self, rank: int, op: Op, number: int) -> None:
        self._last[rank] = (op, number)
        first_op, first_rank = self._first.setdefault(number, (op, rank))
        if first_op is not op:
            raise _CallMismatch(
                {first_rank: Call(self._channel, first_op, number), rank: Call(self._channel, op, number)}
            )
