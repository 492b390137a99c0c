"""What arrives beside the user lane's frames: the control links of one star, read on its ipc thread."""

from __future__ import annotations

import logging
import pickle
import select
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Frame, Kind, encode
from det_core.ipc._link import UnixLink
from det_core.ipc._liveness import open_pidfd
from det_core.ipc._payload import MemoryFile
from det_core.ipc._peer import Handler, Peer
from det_core.ipc._trouble import Trouble

if TYPE_CHECKING:
    from det_core.ipc._star import Star

logger = logging.getLogger("det_core.ipc")


class Control:
    """Reads the control links, watches the peers' processes, and does what each frame asks for.

    Everything but the making of links runs on the ipc thread.
    """

    def __init__(self, star: Star) -> None:
        self._star = star
        self.departed: dict[int, dict[str, Any]] = {}
        """The ranks that said goodbye, with their farewells."""
        self.failures: dict[int, str] = {}
        """Those that did so because of an error, with its text."""
        self._handlers: dict[str, Handler] = {}
        self._kept: dict[str, list[tuple[int, Any]]] = {}
        self._ready: Callable[[], None] = lambda: None
        self._kinds: dict[int, Callable[[Peer, Frame], None]] = {
            Kind.CALL: self._on_call,
            Kind.ENTERED: lambda _peer, frame: star.open_lane(frame.name).heard(frame),
            Kind.POST: lambda _peer, frame: self._on_post(frame),
            Kind.CREDIT: self._on_credit,
            Kind.TROUBLE: lambda peer, frame: star.break_off(Trouble.decode(frame.segments[0]), peer),
            Kind.LEAVING: lambda peer, _frame: setattr(peer, "leaving", True),
            Kind.GOODBYE: self._on_goodbye,
            Kind.GOODBYE_SEEN: self._on_goodbye_seen,
            Kind.DEPARTED: lambda _peer, frame: self._depart(pickle.loads(frame.segments[0])),
            Kind.ASK: self._on_ask,
            Kind.ANSWER: lambda _peer, frame: self._on_answer(frame),
            Kind.READY: lambda _peer, _frame: self._ready(),
            Kind.PROBE: lambda _peer, _frame: None,
        }

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have ``handler`` called for the messages of ``topic``, first for those that came before."""
        self._handlers[topic] = handler
        for rank, message in self._kept.pop(topic, []):
            handler(rank, message)

    # links, made by the rendezvous

    def admit(self, peer: Peer, link: UnixLink | None) -> None:
        """Link up with ``peer``; ``link`` is its control link if it is on this machine."""
        peer.name = self._star.name(peer.rank)
        self._star.peers[peer.rank] = peer
        if link is not None:
            self._star.loop.watch(link.fd, select.EPOLLIN, lambda _events: self._on_link(peer, link))
            peer.pidfd = open_pidfd(peer.pid)
            if peer.pidfd is not None:
                self._star.loop.watch(peer.pidfd, select.EPOLLIN, lambda _events: self._on_death(peer, link))
        if peer.data is not None:
            self._star.open_lane("user").attach(peer.data)

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
            self._star.loop.watch(link.fd, select.EPOLLOUT, lambda _events: self._flush_data(rank))

        return UnixLink(sock, arm=arm, disarm=lambda link: self._star.loop.unwatch(link.fd))

    def _arm_control(self, link: UnixLink) -> None:
        self._star.loop.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    def _disarm_control(self, link: UnixLink) -> None:
        self._star.loop.modify(link.fd, select.EPOLLIN)

    def _flush_data(self, rank: int) -> None:
        self._star.peers[rank].flush_data()
        self._star.stir()

    def _on_link(self, peer: Peer, link: UnixLink) -> None:
        """The link can be read, or written to."""
        if link.queued:
            link.flush()
            self._star.stir()
        self._read(peer, link)

    def _read(self, peer: Peer, link: UnixLink) -> bool:
        """Take in what has arrived; whether it was anything."""
        try:
            frames = link.receive()
            for frame in frames:
                self.dispatch(peer, frame)
        except BadFrame as e:
            self._star.broken(f"{peer} sent what is no message ({e})")
            self._drop(peer)
            return False
        if link.eof:
            self.gone(peer)
        return bool(frames)

    def _on_death(self, peer: Peer, link: UnixLink) -> None:
        """The process is dead; what it said before counts."""
        while not peer.dead and self._read(peer, link):
            pass
        self.gone(peer)

    def gone(self, peer: Peer) -> None:
        """The connection to ``peer``, or its process, is gone: a loss, unless it has said goodbye."""
        if not peer.dead:
            self._drop(peer)
            if not peer.departed:
                self._star.lost(peer)

    def _drop(self, peer: Peer) -> None:
        """Nothing comes from ``peer`` any more and nothing goes to it."""
        peer.dead = True
        peer.control.kill()
        if isinstance(peer.control, UnixLink):
            self._star.loop.unwatch(peer.control.fd)
        if peer.data is not None:
            peer.data.kill()
        if peer.pidfd is not None:
            self._star.loop.unwatch(peer.pidfd)
        self._star.wake_all()

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Take in one control frame."""
        handler = self._kinds.get(frame.kind)
        if handler is None:
            raise BadFrame(f"kind {frame.kind}")
        handler(peer, frame)

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        frame.owed = sum(s.size if isinstance(s, MemoryFile) else memoryview(s).nbytes for s in frame.segments)
        self._star.open_lane(frame.name).deliver(frame)

    def _on_post(self, frame: Frame) -> None:
        message = pickle.loads(frame.segments[0])
        handler = self._handlers.get(frame.name)
        if handler is None:
            self._kept.setdefault(frame.name, []).append((frame.rank, message))
        else:
            handler(frame.rank, message)

    def _on_credit(self, peer: Peer, frame: Frame) -> None:
        peer.room.add(-frame.number)
        self._star.stir()

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        farewell, peer.failure = pickle.loads(frame.segments[0])
        self._depart({peer.rank: (farewell, peer.failure)})
        peer.departed = True
        self._star.departures += 1
        peer.tell(encode(Kind.GOODBYE_SEEN, rank=self._star.rank))
        if self._star.rank == 0:
            body = pickle.dumps({peer.rank: (farewell, peer.failure)}, protocol=5)
            for other in self._star.others():
                other.tell(encode(Kind.DEPARTED, body=body))
        self._star.wake_all()

    def _on_goodbye_seen(self, peer: Peer, _frame: Frame) -> None:
        peer.goodbye_seen = True
        self._star.stir()

    def _depart(self, more: Mapping[int, tuple[dict[str, Any], str | None]]) -> None:
        # new ones: callers read them at any time
        self.failures = {**self.failures, **{rank: text for rank, (_, text) in more.items() if text is not None}}
        self.departed = {**self.departed, **{rank: farewell for rank, (farewell, _) in more.items()}}

    def _on_ask(self, peer: Peer, frame: Frame) -> None:
        text = self._star.open_lane(frame.name).describe()
        peer.tell(encode(Kind.ANSWER, name=frame.name, body=text.encode()))

    def _on_answer(self, frame: Frame) -> None:
        logger.warning("waiting on lane %r: %s", frame.name, bytes(frame.segments[0]).decode())
