"""Communicators between machines: one ZMQ ROUTER on the chief, a DEALER on each worker, used by the ipc thread alone.

A frame is one multipart message: the head, then the bytes of its segments in chunks.

The kernel decides whether a machine can still be reached, by the keepalive of TCP: it answers for a process that is
suspended, swapped out or starved, however long that takes. Keepalive rests while data is on its way, and what takes
its place then knows no good limit: after 15 minutes of retransmissions at the earliest, or, with TCP_USER_TIMEOUT
(ZMQ_TCP_MAXRT), as soon as a suspended process has not made room for that long. So the first rank of each machine has
a second connection, its lifeline, that carries nothing once it stands. Where that one alone ends, the machine is lost;
where a process died the other one ends too, after what it still brings (``ZmqLink.when_silent``).

The monitor reports a connection that is gone by its descriptor, which each first message carries too. Each connection
gets a routing id of its own, so one that comes back is not taken for the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import select
import stat
import termios
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from det_core.errors import RendezvousError
from det_core.ipc._event_loop import EventLoop
from det_core.ipc._frames import IN_MEMORY_FILE, UNTRUSTED_LIMIT, BadFrame, Frame, decode_head, inline_bytes
from det_core.ipc._serialization import Packet, cut_body

if TYPE_CHECKING:
    import zmq

CHUNK_BYTES = 512 << 10
"""Size of a part of a message."""
KEEPALIVE_IDLE = 3
KEEPALIVE_INTERVAL = 1
KEEPALIVE_COUNT = 5
"""A connection is lost once this many probes, sent after so many seconds of silence, have had no answer. The sum,
IDLE + INTERVAL * COUNT, stays below the ten seconds in which a cut cable is an error."""
_SILENCE_INTERVAL = 0.25
"""Seconds between the two looks that must find nothing from a peer whose lifeline has ended."""
_BACKLOG = 4096
"""Connections that wait to be accepted: the kernel drops those beyond, and each tries again seconds later."""
_LINGER_MS = 1000


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
        self._queue: deque[list[zmq.Frame]] = deque()
        self._dead = False

    @property
    def queued(self) -> int:
        """How many messages are still to be handed to ZMQ."""
        return len(self._queue)

    def send(self, packet: Packet | bytes) -> int:
        """Queue one frame; its bytes are our own, so the caller may change his."""
        if not self._dead:
            copy = self._socket.copy
            self._queue.append([copy(packet)] if isinstance(packet, bytes) else packet.remote(CHUNK_BYTES, copy))
            self._socket.loop.call_soon(self.flush)
        return 0

    def flush(self) -> None:
        """Hand what is queued to ZMQ; on the ipc thread."""
        while self._queue and not self._dead:
            self._socket.transmit(self.route, self._queue.popleft())

    def when_silent(self, then: Callable[[], None]) -> None:
        """Call ``then()`` on the ipc thread once the peer sends nothing any more, unless the link is killed before.

        For the end of its lifeline: if its process died, what it said before is still to be taken in, and so is the end
        of this connection after that.
        """
        self._socket.loop.call_later(_SILENCE_INTERVAL, lambda: self._look_again(then, was_silent=False))

    def _look_again(self, then: Callable[[], None], *, was_silent: bool) -> None:
        self._socket.take_in()  # first, as this process may have stood still since the last time
        if self._dead:
            return
        is_silent = not self._socket.has_unread(self.route)
        if is_silent and was_silent:  # twice, as ZMQ may have read something and not handed it over yet
            then()
        else:
            self._socket.loop.call_later(_SILENCE_INTERVAL, lambda: self._look_again(then, was_silent=is_silent))

    def kill(self) -> None:
        """Send nothing any more."""
        self._dead = True
        self._queue.clear()

    def close(self) -> None:
        """Nothing of its own to let go of."""


class ZmqSocket:
    """A ZMQ socket of one star, with its monitor.

    Args:
        loop: whose thread does everything here but the construction.
        key: made from the secret; None: in clear text, for anybody.
        on_frame: called with the sender's route and each frame.
        on_lost: called with the route of each connection that is gone, once all that it brought is taken in.
        trusts: whether the peer at a route may send more than a hello.
        on_event: called with each event of the monitor.
    """

    def __init__(
        self,
        loop: EventLoop,
        key: ChiefKey | None,
        *,
        on_frame: Callable[[bytes | None, Frame], None],
        on_lost: Callable[[bytes | None], None],
        is_admitted: Callable[[bytes | None], bool] = lambda _route: True,
        on_event: Callable[[int], None] = lambda _event: None,
    ) -> None:
        import zmq

        self.loop = loop
        self._zmq, self._key = zmq, key
        self._on_frame, self._on_lost, self._is_admitted, self._on_event = on_frame, on_lost, is_admitted, on_event
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._router = False
        self._descriptors: dict[int, int] = {}
        """The inodes of the TCP sockets that ZMQ has open, by descriptor."""
        self._routes: dict[int, bytes] = {}
        """On the chief, the routes of the connections, by descriptor."""
        self._lost: deque[bytes | None] = deque()

    # opening

    def bind(self, interface: str, port: int) -> None:
        """Become the chief's side, listening at ``port`` of ``interface`` (``*``: all, of IPv4 and IPv6).

        Raises:
            RendezvousError: the port is taken.
        """
        self._router = True
        socket = self._make(self._zmq.ROUTER)
        socket.set(self._zmq.ROUTER_MANDATORY, 1)
        socket.set(self._zmq.BACKLOG, _BACKLOG)
        socket.set(self._zmq.IPV6, int(interface == "*"))
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

    def connect(self, host: str, port: int, *, ipv6: bool) -> None:
        """Become a worker's side; ZMQ keeps trying until the chief is there.

        Args:
            host: name or address of the chief.
            port: where it listens.
            ipv6: whether to look for an IPv6 address of ``host``, which ZMQ prefers then.
        """
        socket = self._make(self._zmq.DEALER)
        if self._key is not None:
            public, secret = self._zmq.curve_keypair()
            socket.set(self._zmq.CURVE_SERVERKEY, self._key.public)
            socket.set(self._zmq.CURVE_PUBLICKEY, public)
            socket.set(self._zmq.CURVE_SECRETKEY, secret)
        socket.set(self._zmq.IPV6, int(ipv6))
        self._register()
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    def _make(self, kind: int) -> zmq.Socket[bytes]:
        zmq = self._zmq
        socket = self._socket = self._context.socket(kind)
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.SNDHWM: 0,  # the bound on queued bytes is ours: in bytes, and nothing is dropped at it
            zmq.RCVHWM: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE,
            zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL,
            zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
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
            self.loop.after_each.append(self.take_in)

        self.loop.call_soon(register)

    # on the ipc thread

    def copy(self, data: Any) -> zmq.Frame:
        """Return a part of a message with a copy of ``data``, which ZMQ shares among all to whom it is sent."""
        return self._zmq.Frame(data, copy=True)

    def transmit(self, route: bytes | None, parts: list[zmq.Frame]) -> None:
        """Hand ZMQ one message for the peer with that route (None: for the chief)."""
        if self._socket is None:
            return
        message: list[Any] = parts if route is None else [route, *parts]
        try:
            self._socket.send_multipart(message, self._zmq.DONTWAIT, copy=False)
        except self._zmq.ZMQError as e:
            if e.errno not in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                raise
            self._lost.append(route)

    def take_in(self) -> None:
        """Take in all there is: ZMQ's descriptors tell of news once, not for as long as there are any."""
        while self._socket is not None and (self._serve_monitor() | self._serve_socket()):
            pass
        while self._lost:  # only now: what a lost peer said before counts
            self._on_lost(self._lost.popleft())

    def has_unread(self, route: bytes | None) -> bool:
        """Return whether the kernel has bytes from the peer with that route that ZMQ has not read yet."""
        for descriptor in self._open_descriptors():
            if self._routes.get(descriptor) == route:
                with contextlib.suppress(OSError):  # it is closed again
                    return any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
        return False

    def _ready(self, socket: zmq.Socket[bytes] | None) -> bool:
        return socket is not None and bool(int(socket.get(self._zmq.EVENTS)) & self._zmq.POLLIN)

    def _serve_monitor(self) -> bool:
        from zmq.utils.monitor import recv_monitor_message

        zmq = self._zmq
        if self._monitor is None or not self._ready(self._monitor):
            return False
        message = recv_monitor_message(self._monitor)
        event, descriptor = int(message["event"]), int(message["value"])
        if event in (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            with contextlib.suppress(OSError):  # it is closed again
                self._descriptors[descriptor] = os.fstat(descriptor).st_ino
        elif event == zmq.EVENT_DISCONNECTED:
            self._descriptors.pop(descriptor, None)
            route = self._routes.pop(descriptor, None)
            if route is not None or not self._router:
                self._lost.append(route)
        self._on_event(event)
        return True

    def _serve_socket(self) -> bool:
        if self._socket is None or not self._ready(self._socket):
            return False
        parts = self._socket.recv_multipart(self._zmq.DONTWAIT, copy=False)
        route = parts.pop(0).bytes if self._router else None
        trusted = self._is_admitted(route)
        if route is not None and not trusted:
            self._note(route, int(parts[-1].get(self._zmq.SRCFD)))
        try:
            self._on_frame(route, _decode([part.buffer for part in parts], None if trusted else UNTRUSTED_LIMIT))
        except BadFrame:
            if trusted:
                raise
        return True

    def _note(self, route: bytes, descriptor: int) -> None:
        """Remember by which descriptor the monitor will report the end of a new connection."""
        while self._serve_monitor():  # the end of an earlier connection with that descriptor may be still to be read
            pass
        if descriptor in self._descriptors:
            self._routes[descriptor] = route
        else:
            self._lost.append(route)

    # closing

    def close(self) -> None:
        """Close the sockets; what is queued in ZMQ gets a second to leave."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._socket.close()
            self._monitor.close(0)
        self._socket = self._monitor = None
        self._context.term()

    def close_in_child(self) -> None:
        """Close the TCP sockets in a forked child, whose copies would keep the connections of a dead rank open."""
        for descriptor in self._open_descriptors():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open_descriptors(self) -> Iterator[int]:
        for descriptor, inode in self._descriptors.items():
            with contextlib.suppress(OSError):
                entry = os.fstat(descriptor)
                # ZMQ may have closed it a moment ago, and something else may have got its number
                if entry.st_ino == inode and stat.S_ISSOCK(entry.st_mode):
                    yield descriptor


def _decode(parts: list[Any], limit: int | None) -> Frame:
    """Return a received message as a frame.

    Raises:
        BadFrame: it is none.
    """
    if not parts:
        raise BadFrame("an empty message")
    first = memoryview(parts[0])
    head = decode_head(first, limit)
    if head is None or any(n & IN_MEMORY_FILE for n in head[1]):
        raise BadFrame("half a head")
    frame, lengths, begin = head
    body = bytearray().join([first[begin:], *parts[1:]])
    if len(body) != inline_bytes(lengths):
        raise BadFrame("a message of the wrong size")
    frame.segments = cut_body(lengths, body, iter(()))
    return frame
