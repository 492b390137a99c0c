"""A worker's side of the rendezvous: finding the chief and being let in."""

from __future__ import annotations

import json
import os
import socket
import threading

from det_core.errors import CollectiveTimeout, RendezvousError
from det_core.ipc._frames import Frame, Kind, encode
from det_core.ipc._liveness import Patience
from det_core.ipc._peer import Peer
from det_core.ipc._remote import Hub
from det_core.ipc._rendezvous import Hello, Refused, knock, prove, wait_for
from det_core.ipc._secrets import CurveKeys
from det_core.ipc._star import Star

_REFUSED_BY_CURVE = 3
"""Failed handshakes in a row after which the secret, not the network, is to blame."""
_COME_AGAIN = 0.2


def join_unix(star: Star, path: str, secret: str | None, job: str) -> None:
    """Join the chief of this machine; returns when every rank is there."""
    patience = Patience(star.timeout, lambda: f"rank {star.name(star.rank)} waits for the chief to open {path}.sock")

    def hello(nonce: str) -> Hello:
        return _hello(star, job, prove(secret, nonce, star.rank))

    pause, answer = 0.002, None
    while answer is None:
        try:
            answer = knock(path, hello)
        except Refused as e:
            if not e.again:
                raise RendezvousError(_refused(star, str(e))) from None
        if answer is None:
            if patience.expired:
                raise CollectiveTimeout(f"no chief at {path}.sock after {patience.waited:.1f} s")
            threading.Event().wait(patience.next(pause))
            pause = min(0.05, pause * 1.5)
    sock, welcome, data, (pid, _uid) = answer
    host, told = json.loads(bytes(welcome.segments[0]))
    control = star.control.control_link(sock)
    peer = Peer(0, host, pid or told, control, bound=star.bound)
    peer.data = star.control.data_link(data, 0)
    ready = threading.Event()
    star.control.on_ready(ready.set)
    star.call_soon(lambda: star.control.admit(peer, control))
    wait_for(star, ready, lambda: "the chief waits for other ranks")


def join_remote(star: Star, host: str, port: int, keys: CurveKeys | None, job: str) -> None:
    """Join the chief of another machine; returns when every rank is there."""
    knocking = _Knocking(star, host, port, keys, job)
    wait_for(star, knocking.ready, knocking.state)
    if knocking.refusal is not None:
        raise RendezvousError(knocking.refusal)


class _Knocking:
    """Says hello at every new connection until the chief answers. On the ipc thread, after the constructor."""

    def __init__(self, star: Star, host: str, port: int, keys: CurveKeys | None, job: str) -> None:
        import zmq

        self.star = star
        self.address = f"{host}:{port}"
        self.ready = threading.Event()
        self.refusal: str | None = None
        self._zmq = zmq
        self._job = job
        self._peer: Peer | None = None
        self._failures = 0
        star.control.on_ready(self.ready.set)
        self._hub = Hub(
            star.loop,
            keys,
            on_frame=lambda _route, frame: self._on_frame(frame),
            on_unreachable=lambda _link: self._on_lost(),
            trusted=lambda _route: True,
        )
        self._hub.on_event = self._on_event
        self._link = self._hub.link(None)
        star.closers.append(self._hub.close)
        self._hub.connect(host, port)

    def state(self) -> str:
        """For the warning while it takes long."""
        if self._peer is None:
            return f"no answer from the chief at {self.address}"
        return "the chief waits for other ranks"

    def _on_event(self, event: int) -> None:
        zmq = self._zmq
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            self._say_hello()
        elif event == zmq.EVENT_DISCONNECTED:
            self._hub.lose(self._link)
        elif event & (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        ):
            self._failures += 1
            if self._failures >= _REFUSED_BY_CURVE and self._peer is None:
                self._give_up(
                    f"the chief at {self.address} refuses the connection: DET_CORE_SECRET (or DET_SESSION_TOKEN) is "
                    "not the same on both machines, or something else listens there"
                )

    def _say_hello(self) -> None:
        if self._peer is None:
            self._link.send(encode(Kind.HELLO, rank=self.star.rank, body=_hello(self.star, self._job).encode()))

    def _on_frame(self, frame: Frame) -> None:
        if self._peer is not None:
            self.star.control.dispatch(self._peer, frame)
        elif frame.kind == Kind.WELCOME:
            host, pid = json.loads(bytes(frame.segments[0]))
            peer = self._peer = Peer(0, host, pid, self._link, bound=self.star.bound)
            peer.remote = True
            self.star.control.admit(peer, None)
        elif frame.kind == Kind.REFUSED:
            again, reason = json.loads(bytes(frame.segments[0]))
            if again:
                self.star.loop.call_later(_COME_AGAIN, self._say_hello)
            else:
                self._give_up(_refused(self.star, reason))

    def _give_up(self, why: str) -> None:
        self.refusal = why
        self.ready.set()

    def _on_lost(self) -> None:
        if self._peer is not None:
            self.star.control.gone(self._peer)


def _hello(star: Star, job: str, proof: str = "") -> Hello:
    return Hello(star.rank, star.size, socket.gethostname(), os.getpid(), job=job, proof=proof)


def _refused(star: Star, reason: str) -> str:
    return f"the chief does not let rank {star.name(star.rank)} in: {reason}"
