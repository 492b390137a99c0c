"""Links between machines: one ZMQ ROUTER on the chief, a DEALER on each worker, used by the ipc thread alone.

A frame is one multipart message: the head, then the bytes of its segments in chunks (so that a heartbeat never waits
behind a large array). Loss shows in ZMQ's own heartbeats, which its I/O thread sends whatever Python does: the monitor
reports the disconnection, and a ROUTER socket that must route (``ROUTER_MANDATORY``) refuses to send to a peer whose
connection is gone. Each connection gets a routing id of its own, so one that comes back is not taken for the old one.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from det_core._clock import monotonic
from det_core.errors import RendezvousError
from det_core.ipc._frames import (
    IN_FILE,
    UNTRUSTED_LIMIT,
    BadFrame,
    Buffer,
    Frame,
    Kind,
    decode_head,
    encode,
    inline_bytes,
)
from det_core.ipc._loop import Loop
from det_core.ipc._payload import Packet, cut_body
from det_core.ipc._secrets import CurveKeys

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


class RemoteLink:
    """The way to one peer of another machine: a queue that the ipc thread empties into the ZMQ socket."""

    def __init__(self, hub: Hub, route: bytes | None) -> None:
        self.route = route
        self.prefix = () if route is None else (route,)
        self.queued = 0
        self.queue: deque[list[bytes]] = deque()
        self._hub = hub
        self._dead = False

    def send(self, packet: Packet | bytes) -> int:
        """Queue one frame; its bytes are copied before this returns, so that the caller may change them."""
        if self._dead:
            return 0
        parts = [packet] if isinstance(packet, bytes) else packet.remote(CHUNK)
        self.queue.append(parts)
        self._hub.loop.call_soon(self.flush)
        return 0

    def flush(self) -> None:
        """Hand what is queued to ZMQ; on the ipc thread."""
        while self.queue and not self._dead:
            self._hub.transmit(self, self.queue.popleft())

    def kill(self) -> None:
        """Send nothing any more."""
        self._dead = True
        self.queue.clear()

    def close(self) -> None:
        """Nothing of its own to let go of: the hub has the socket."""


class Hub:
    """The ZMQ socket of one star, with its monitor and, on the chief, the handler that decides who may connect.

    Args:
        loop: whose thread does everything here but the construction.
        keys: CURVE keys made from the secret; None: in clear text, for anybody.
        on_frame: called with the sender's route and each frame.
        on_unreachable: called with the link of a peer whose connection is gone.
    """

    def __init__(
        self,
        loop: Loop,
        keys: CurveKeys | None,
        *,
        on_frame: Callable[[bytes | None, Frame], None],
        on_unreachable: Callable[[RemoteLink], None],
        trusted: Callable[[bytes | None], bool],
    ) -> None:
        import zmq

        self.loop = loop
        self.links: list[RemoteLink] = []
        self.on_event: Callable[[int], None] = lambda _event: None
        """Called with each event of the monitor."""
        self._zmq = zmq
        self._keys = keys
        self._on_frame, self._on_unreachable, self._trusted = on_frame, on_unreachable, trusted
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._gate: zmq.Socket[bytes] | None = None
        self._router = False
        self._lost: deque[RemoteLink] = deque()
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
        if self._keys is not None:
            self._gate = self._context.socket(self._zmq.REP)
            self._gate.bind("inproc://zeromq.zap-01")
            socket.set(self._zmq.CURVE_SERVER, 1)
            socket.set(self._zmq.CURVE_SECRETKEY, self._keys.chief_secret)
            socket.set(self._zmq.ZAP_DOMAIN, b"det_core")
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
        if self._keys is not None:
            socket.set(self._zmq.CURVE_SERVERKEY, self._keys.chief_public)
            socket.set(self._zmq.CURVE_PUBLICKEY, self._keys.worker_public)
            socket.set(self._zmq.CURVE_SECRETKEY, self._keys.worker_secret)
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
            for socket in (self._socket, self._monitor, self._gate):
                if socket is not None:
                    self.loop.watch(int(socket.get(self._zmq.FD)), select.EPOLLIN, lambda _events: None)
            self.loop.after_each = self._serve

        self.loop.call_soon(register)

    def link(self, route: bytes | None) -> RemoteLink:
        """The way to the peer with that route (None: to the chief)."""
        link = RemoteLink(self, route)
        self.links.append(link)
        return link

    # on the ipc thread

    def transmit(self, link: RemoteLink, parts: list[bytes]) -> None:
        """Hand one message to ZMQ."""
        if self._socket is None:
            return
        try:
            self._socket.send_multipart([*link.prefix, *parts], self._zmq.DONTWAIT)
        except self._zmq.ZMQError as e:
            if e.errno not in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                raise
            self.lose(link)

    def lose(self, link: RemoteLink) -> None:
        """The connection of ``link`` is gone: say so once all that has arrived is taken in."""
        self._lost.append(link)
        self.loop.call_soon(lambda: None)

    def _serve(self) -> None:
        """Take in all there is: ZMQ's descriptors tell of news once, not for as long as there are any."""
        again = True
        while again and self._socket is not None:
            again = self._serve_gate() | self._serve_monitor() | self._serve_socket()
        while self._lost:  # only now: what a lost peer said before counts
            self._on_unreachable(self._lost.popleft())
        if self._probing_until:
            self._probe()

    def _ready(self, socket: zmq.Socket[bytes] | None) -> bool:
        return socket is not None and bool(int(socket.get(self._zmq.EVENTS)) & self._zmq.POLLIN)

    def _serve_gate(self) -> bool:
        """Answer ZMQ's question who may connect: the one client key (ZAP, rfc.zeromq.org/spec/27)."""
        if self._gate is None or self._keys is None or not self._ready(self._gate):
            return False
        version, request, _domain, _address, _identity, mechanism, *credentials = self._gate.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._keys.worker_raw]
        verdict = (b"200", b"OK") if known else (b"400", b"this key is not known here")
        self._gate.send_multipart([version, request, *verdict, b"worker" if known else b"", b""])
        return True

    def _serve_monitor(self) -> bool:
        from zmq.utils.monitor import recv_monitor_message

        if self._monitor is None or not self._ready(self._monitor):
            return False
        event = int(recv_monitor_message(self._monitor)["event"])
        if event == self._zmq.EVENT_DISCONNECTED and self._router:
            self._probing_until = monotonic() + _PROBE_FOR
        self.on_event(event)
        return True

    def _probe(self) -> None:
        """Find out whose connection is gone: sending there fails."""
        now = monotonic()
        if now >= self._probing_until:
            self._probing_until = 0.0
            return
        if now < self._next_probe:
            return
        self._next_probe = now + 0.1
        self.loop.call_later(0.11, lambda: None)
        for link in list(self.links):
            link.send(encode(Kind.PROBE))

    def _serve_socket(self) -> bool:
        if not self._ready(self._socket):
            return False
        assert self._socket is not None
        parts = self._socket.recv_multipart(self._zmq.DONTWAIT)
        route = parts.pop(0) if self._router else None
        try:
            self._on_frame(route, decode(parts, None if self._trusted(route) else UNTRUSTED_LIMIT))
        except BadFrame:
            if self._trusted(route):
                raise
        return True

    # closing

    def close(self) -> None:
        """Close the sockets; what is queued in ZMQ gets a second to leave."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close()
        for socket in (self._monitor, self._gate):
            if socket is not None:
                socket.close(0)
        self._socket = self._monitor = self._gate = None
        self._context.term()


def decode(parts: list[bytes], limit: int | None) -> Frame:
    """A received message as a frame.

    Raises:
        BadFrame: it is none.
    """
    if not parts:
        raise BadFrame("an empty message")
    first = memoryview(parts[0])
    head = decode_head(first, limit)
    if head is None or any(n & IN_FILE for n in head.lengths):
        raise BadFrame("half a head")
    runs: Iterable[Buffer] = [first[head.end :], *parts[1:]]
    body = bytearray().join(runs)
    if len(body) != inline_bytes(head.lengths):
        raise BadFrame("a message of the wrong size")
    frame = head.frame
    frame.segments, _ = cut_body(head.lengths, body, iter(()))
    return frame
