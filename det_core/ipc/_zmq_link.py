"""Links between machines: one ZMQ ROUTER on the chief, a DEALER on each worker, used by the ipc thread alone.

A frame is one multipart message: the head, then the bytes of its segments in chunks (so that a heartbeat never waits
behind a large array). Loss shows in ZMQ's own heartbeats, which its I/O thread sends whatever Python does: the monitor
reports the disconnection, and a ROUTER socket that must route (``ROUTER_MANDATORY``) refuses to send to a peer whose
connection is gone. Each connection gets a routing id of its own, so one that comes back is not taken for the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import select
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from det_core._clock import monotonic
from det_core.errors import RendezvousError
from det_core.ipc._event_loop import EventLoop
from det_core.ipc._frames import IN_FILE, UNTRUSTED_LIMIT, BadFrame, Frame, Kind, decode_head, encode, inline_bytes
from det_core.ipc._serialization import Packet, cut_body

if TYPE_CHECKING:
    import zmq

CHUNK = 512 << 10
"""Bytes per part of a message."""
HEARTBEAT_INTERVAL = 1500
"""Milliseconds between two heartbeats of an idle connection."""
HEARTBEAT_TIMEOUT = 6000
"""Milliseconds without an answer after which a connection is lost."""
_PROBE_FOR = 2.0
"""Seconds during which, after a disconnection, the chief looks for whose it was."""
_LINGER = 1000


class ChiefKey(NamedTuple):
    """The chief's CURVE key pair, made from the job's secret.

    The public half is never sent, and no connection is made without it: it is the password.
    """

    secret: bytes
    public: bytes

    @classmethod
    def derive(cls, secret: str) -> ChiefKey:
        """By HKDF-SHA256 (RFC 5869)."""
        import zmq
        from zmq.utils import z85

        extracted = hmac.digest(b"det_core", secret.encode(), hashlib.sha256)
        key = z85.encode(hmac.digest(extracted, b"curve chief\x01", hashlib.sha256))
        return cls(key, zmq.curve_public(key))


class ZmqLink:
    """The way to one peer of another machine: a queue that the ipc thread empties into the ZMQ socket."""

    def __init__(self, socket: ZmqSocket, route: bytes | None) -> None:
        self.route = route
        self._socket = socket
        self._queue: deque[list[bytes]] = deque()
        self._dead = False

    @property
    def queued(self) -> int:
        """How many messages are still to be handed to ZMQ."""
        return len(self._queue)

    def send(self, packet: Packet | bytes) -> int:
        """Queue one frame; its bytes are our own, so the caller may change his."""
        if not self._dead:
            self._queue.append([packet] if isinstance(packet, bytes) else packet.remote(CHUNK))
            self._socket.loop.call_soon(self.flush)
        return 0

    def flush(self) -> None:
        """Hand what is queued to ZMQ; on the ipc thread."""
        while self._queue and not self._dead:
            self._socket.transmit(self, self._queue.popleft())

    def kill(self) -> None:
        """Send nothing any more."""
        self._dead = True
        self._queue.clear()

    def close(self) -> None:
        """Nothing of its own to let go of."""


class ZmqSocket:
    """The ZMQ socket of one star, with its monitor.

    Args:
        loop: whose thread does everything here but the construction.
        key: made from the secret; None: in clear text, for anybody.
        on_frame: called with the sender's route and each frame.
        on_lost: called with the link of a peer whose connection is gone.
        trusts: whether the peer at a route may send more than a hello.
        on_event: called with each event of the monitor.
    """

    def __init__(
        self,
        loop: EventLoop,
        key: ChiefKey | None,
        *,
        on_frame: Callable[[bytes | None, Frame], None],
        on_lost: Callable[[ZmqLink], None],
        trusts: Callable[[bytes | None], bool] = lambda _route: True,
        on_event: Callable[[int], None] = lambda _event: None,
    ) -> None:
        import zmq

        self.loop = loop
        self.links: list[ZmqLink] = []
        self._zmq, self._key = zmq, key
        self._on_frame, self._on_lost, self._trusts, self._on_event = on_frame, on_lost, trusts, on_event
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._router = False
        self._lost: deque[ZmqLink] = deque()
        self._probing_until = self._next_probe = 0.0

    # opening

    def bind(self, interface: str, port: int) -> None:
        """Become the chief's side, listening at ``port`` of ``interface`` (``*``: all).

        Raises:
            RendezvousError: the port is taken.
        """
        self._router = True
        socket = self._make(self._zmq.ROUTER)
        socket.set(self._zmq.ROUTER_MANDATORY, 1)
        if self._key is not None:
            socket.set(self._zmq.CURVE_SERVER, 1)
            socket.set(self._zmq.CURVE_SECRETKEY, self._key.secret)
        try:
            socket.bind(f"tcp://{interface}:{port}")
        except self._zmq.ZMQError as e:
            self.close()
            raise RendezvousError(
                f"the chief cannot listen at port {port}: {e}. If another job uses the port, give this one another: "
                "DistributedContext(…, pub_port=12361) or export INTER_TRAIN_PROCESS_COMM_PORT_1=12361 on each machine"
            ) from None
        self._register()

    def connect(self, host: str, port: int) -> None:
        """Become a worker's side; ZMQ keeps trying until the chief is there."""
        socket = self._make(self._zmq.DEALER)
        if self._key is not None:
            public, secret = self._zmq.curve_keypair()
            socket.set(self._zmq.CURVE_SERVERKEY, self._key.public)
            socket.set(self._zmq.CURVE_PUBLICKEY, public)
            socket.set(self._zmq.CURVE_SECRETKEY, secret)
        if ":" in host:
            socket.set(self._zmq.IPV6, 1)
            host = f"[{host}]"
        self._register()
        socket.connect(f"tcp://{host}:{port}")

    def _make(self, kind: int) -> zmq.Socket[bytes]:
        zmq = self._zmq
        socket = self._socket = self._context.socket(kind)
        options = {
            zmq.LINGER: _LINGER,
            zmq.SNDHWM: 0,  # the bound on queued bytes is ours: in bytes, and nothing is dropped at it
            zmq.RCVHWM: 0,
            zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT,
            zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 5,
            zmq.TCP_KEEPALIVE_INTVL: 2,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.CONNECT_TIMEOUT: 5000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        for option, value in options.items():
            socket.set(option, value)
        self._monitor = socket.get_monitor_socket()
        return socket

    def _register(self) -> None:
        def register() -> None:
            for socket in (self._socket, self._monitor):
                if socket is not None:
                    self.loop.watch(int(socket.get(self._zmq.FD)), select.EPOLLIN, lambda _events: None)
            self.loop.after_each = self._serve

        self.loop.call_soon(register)

    def link(self, route: bytes | None) -> ZmqLink:
        """The way to the peer with that route (None: to the chief)."""
        link = ZmqLink(self, route)
        self.links.append(link)
        return link

    # on the ipc thread

    def transmit(self, link: ZmqLink, parts: list[bytes]) -> None:
        """Hand one message to ZMQ."""
        if self._socket is None:
            return
        try:
            self._socket.send_multipart(parts if link.route is None else [link.route, *parts], self._zmq.DONTWAIT)
        except self._zmq.ZMQError as e:
            if e.errno not in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                raise
            self.lose(link)

    def lose(self, link: ZmqLink) -> None:
        """The connection of ``link`` is gone: say so once all that has arrived is taken in."""
        self._lost.append(link)
        self.loop.call_soon(lambda: None)

    def _serve(self) -> None:
        """Take in all there is: ZMQ's descriptors tell of news once, not for as long as there are any."""
        while self._socket is not None and (self._serve_monitor() | self._serve_socket()):
            pass
        while self._lost:  # only now: what a lost peer said before counts
            self._on_lost(self._lost.popleft())
        if self._probing_until:
            self._probe()

    def _ready(self, socket: zmq.Socket[bytes] | None) -> bool:
        return socket is not None and bool(int(socket.get(self._zmq.EVENTS)) & self._zmq.POLLIN)

    def _serve_monitor(self) -> bool:
        from zmq.utils.monitor import recv_monitor_message

        if self._monitor is None or not self._ready(self._monitor):
            return False
        event = int(recv_monitor_message(self._monitor)["event"])
        if event == self._zmq.EVENT_DISCONNECTED and self._router:
            self._probing_until = monotonic() + _PROBE_FOR
        self._on_event(event)
        return True

    def _serve_socket(self) -> bool:
        if self._socket is None or not self._ready(self._socket):
            return False
        parts = self._socket.recv_multipart(self._zmq.DONTWAIT)
        route = parts.pop(0) if self._router else None
        trusted = self._trusts(route)
        try:
            self._on_frame(route, _decode(parts, None if trusted else UNTRUSTED_LIMIT))
        except BadFrame:
            if trusted:
                raise
        return True

    def _probe(self) -> None:
        """Find out whose connection is gone: sending there fails."""
        now = monotonic()
        if now >= self._probing_until:
            self._probing_until = 0.0
        elif now >= self._next_probe:
            self._next_probe = now + 0.1
            self.loop.call_later(0.11, lambda: None)
            for link in list(self.links):
                link.send(encode(Kind.PROBE))

    # closing

    def close(self) -> None:
        """Close the sockets; what is queued in ZMQ gets a second to leave."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._socket.close()
            self._monitor.close(0)
        self._socket = self._monitor = None
        self._context.term()


def _decode(parts: list[bytes], limit: int | None) -> Frame:
    """A received message as a frame.

    Raises:
        BadFrame: it is none.
    """
    if not parts:
        raise BadFrame("an empty message")
    first = memoryview(parts[0])
    head = decode_head(first, limit)
    if head is None or any(n & IN_FILE for n in head[1]):
        raise BadFrame("half a head")
    frame, lengths, begin = head
    body = bytearray().join([first[begin:], *parts[1:]])
    if len(body) != inline_bytes(lengths):
        raise BadFrame("a message of the wrong size")
    frame.segments = cut_body(lengths, body, iter(()))
    return frame
