"""Links between nodes: one ZMQ ROUTER on the chief, a DEALER on each worker, used by the ipc thread alone.

A frame is one multipart message: the head, then the bytes of its segments in chunks.

TCP keepalive decides whether a node is reachable: the kernel answers probes for a process that is suspended, swapped
out or starved, for however long. Probes pause while data is unacknowledged, and no limit suits what replaces them
then: retransmissions end after 15 minutes at the earliest, or, with TCP_USER_TIMEOUT (ZMQ_TCP_MAXRT), as soon as a
suspended process has not read for that long. So the first rank of each node has a second connection, its lifeline,
which carries nothing after its first message. If the lifeline alone ends, the node is lost; if the process died, its
other connection ends too, after the rest of its messages (``ZmqLink.when_silent``).
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
"""Maximum size of a part of a message."""
KEEPALIVE_IDLE = 3
"""Seconds without data after which the kernel probes a connection.

The connection is lost after IDLE + INTERVAL * COUNT seconds without an answer, below the promised ten for a cut cable.
"""
KEEPALIVE_INTERVAL = 1
"""Seconds between two probes."""
KEEPALIVE_COUNT = 5
"""Number of unanswered probes after which the connection is lost."""
_SILENCE_INTERVAL = 0.25
"""Seconds between the two checks that must find nothing unread of a peer whose lifeline has ended."""
_BACKLOG = 4096
"""Maximum number of pending connections; the kernel drops further ones, which ZMQ retries seconds later."""
_LINGER_MS = 1000
_CONNECT_TIMEOUT_MS = 5000
_RECONNECT_INTERVAL_MS = 100
_MAX_RECONNECT_INTERVAL_MS = 1000


class ChiefKey(NamedTuple):
    """CURVE key pair of the chief, derived from the job's secret.

    The public half is never sent, and no connection is made without it, so it serves as the password.
    """

    secret: bytes
    public: bytes

    @classmethod
    def derive(cls, secret: str) -> ChiefKey:
        """Derive the keys by HKDF-SHA256 (RFC 5869)."""
        import zmq
        from zmq.utils import z85

        extracted = hmac.digest(b"det_core", secret.encode(), hashlib.sha256)
        key = z85.encode(hmac.digest(extracted, b"curve chief\x01", hashlib.sha256))
        return cls(key, zmq.curve_public(key))


class ZmqLink:
    """Connection to one peer on another node: a queue that the ipc thread flushes into the ZMQ socket."""

    def __init__(self, socket: ZmqSocket, route: bytes | None) -> None:
        self.route = route
        self._socket = socket
        self._queue: deque[list[zmq.Frame]] = deque()
        self._is_dead = False

    @property
    def queued(self) -> int:
        """Number of messages that ZMQ does not have yet."""
        return len(self._queue)

    def send(self, packet: Packet | bytes) -> int:
        """Queue one frame. The caller may change its objects at once."""
        if not self._is_dead:
            copy = self._socket.copy
            if isinstance(packet, bytes):
                self._queue.append([copy(packet)])
            else:
                self._queue.append(packet.remote(CHUNK_BYTES, copy))
            self._socket.loop.call_soon(self.flush)
        return 0

    def flush(self) -> None:
        """Send the queue to ZMQ; on the ipc thread."""
        while self._queue and not self._is_dead:
            self._socket.transmit(self.route, self._queue.popleft())

    def when_silent(self, then: Callable[[], None]) -> None:
        """Call ``then()`` on the ipc thread once nothing of the peer is unread, unless the link is killed before.

        Called at the end of the peer's lifeline: if its process died, its last messages, and the end of this connection
        after them, may still be unread.
        """
        self._socket.loop.call_later(_SILENCE_INTERVAL, lambda: self._check_silence(then, was_silent=False))

    def _check_silence(self, then: Callable[[], None], *, was_silent: bool) -> None:
        # First read, as this process may have been suspended since the last check.
        self._socket.receive_all()
        if self._is_dead:
            return
        is_silent = not self._socket.has_unread(self.route)
        # Twice, as ZMQ's own thread may have read a message and not delivered it yet.
        if is_silent and was_silent:
            then()
        else:
            self._socket.loop.call_later(_SILENCE_INTERVAL, lambda: self._check_silence(then, was_silent=is_silent))

    def kill(self) -> None:
        """Discard the queue and all further messages."""
        self._is_dead = True
        self._queue.clear()

    def close(self) -> None:
        """Do nothing: the socket belongs to all links of the communicator."""


class ZmqSocket:
    """ZMQ socket of one communicator, with its monitor.

    Args:
        loop: loop whose thread calls everything here except the constructor, ``bind`` and ``connect``.
        key: keys derived from the secret, or None for unencrypted connections from anybody.
        on_frame: called with the sender's route and each frame.
        on_disconnect: called with the route of each connection that ended, after all of its frames.
        is_admitted: called with a route; returns whether its peer is authenticated.
        on_event: called with each event of the monitor.
    """

    def __init__(
        self,
        loop: EventLoop,
        key: ChiefKey | None,
        *,
        on_frame: Callable[[bytes | None, Frame], None],
        on_disconnect: Callable[[bytes | None], None],
        is_admitted: Callable[[bytes | None], bool] = lambda _route: True,
        on_event: Callable[[int], None] = lambda _event: None,
    ) -> None:
        # Here, as a job on one node needs no ZMQ: import takes 40 ms.
        import zmq

        self.loop = loop
        self._zmq = zmq
        self._key = key
        self._on_frame = on_frame
        self._on_disconnect = on_disconnect
        self._is_admitted = is_admitted
        self._on_event = on_event
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_chief = False
        self._inodes: dict[int, int] = {}
        """Inodes of ZMQ's open TCP sockets, by descriptor."""
        self._routes: dict[int, bytes] = {}
        """On the chief, routes of the connections, by descriptor.

        The monitor names a closed connection by its descriptor, which each received message carries, too. ZMQ gives
        each connection a routing ID of its own, so a worker that reconnects is not taken for the lost one."""
        self._disconnected: deque[bytes | None] = deque()

    # opening

    def bind(self, interface: str, port: int) -> None:
        """Listen on the chief.

        Args:
            interface: address to listen at, or ``*`` for all of IPv4 and IPv6.
            port: port to listen at.

        Raises:
            RendezvousError: If the port is taken.
        """
        self._is_chief = True
        socket = self._make(self._zmq.ROUTER)
        socket.set(self._zmq.ROUTER_MANDATORY, 1)  # by default messages to a lost peer are dropped without an error
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
                f"the chief cannot listen at port {port}: {e}; if another job uses it, choose another port: "
                "DistributedContext(…, pub_port=12361) or export INTER_TRAIN_PROCESS_COMM_PORT_1=12361 on each node"
            ) from None
        self._register()

    def connect(self, host: str, port: int, *, ipv6: bool) -> None:
        """Connect a worker to the chief; ZMQ retries until the chief listens.

        Args:
            host: name or address of the chief's node.
            port: port of the chief.
            ipv6: whether to connect by IPv6 if ``host`` has such an address.
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
            zmq.SNDHWM: 0,  # no limit by messages, at which a ROUTER drops them: Peer limits the bytes in flight
            zmq.RCVHWM: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE,
            zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL,
            zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
            zmq.CONNECT_TIMEOUT: _CONNECT_TIMEOUT_MS,
            zmq.RECONNECT_IVL: _RECONNECT_INTERVAL_MS,
            zmq.RECONNECT_IVL_MAX: _MAX_RECONNECT_INTERVAL_MS,
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
            self.loop.after_each.append(self.receive_all)

        self.loop.call_soon(register)

    # on the ipc thread

    def copy(self, data: Any) -> zmq.Frame:
        """Return a message part with a copy of ``data``, shared by all its receivers."""
        return self._zmq.Frame(data, copy=True)

    def transmit(self, route: bytes | None, parts: list[zmq.Frame]) -> None:
        """Send one message to the peer with this route, or to the chief if it is None."""
        if self._socket is None:
            return
        message: list[Any] = parts
        if route is not None:
            message = [route, *parts]
        try:
            self._socket.send_multipart(message, self._zmq.DONTWAIT, copy=False)
        except self._zmq.ZMQError as e:
            if e.errno not in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                raise
            self._disconnected.append(route)

    def receive_all(self) -> None:
        """Receive all frames and events there are."""
        # ZMQ's descriptor is edge-triggered: what is left unread now causes no further wakeup.
        while self._socket is not None and (self._serve_monitor() | self._serve_socket()):
            pass
        # Last, as the final frames of a lost peer may be the reason why it ended.
        while self._disconnected:
            self._on_disconnect(self._disconnected.popleft())

    def has_unread(self, route: bytes | None) -> bool:
        """Return whether the kernel holds bytes from the peer with this route that ZMQ has not read yet."""
        for descriptor in self._open_descriptors():
            if self._routes.get(descriptor) == route:
                with contextlib.suppress(OSError):  # ZMQ's own thread may have closed it meanwhile
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
        event = int(message["event"])
        descriptor = int(message["value"])
        if event in (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            with contextlib.suppress(OSError):  # ZMQ's own thread may have closed it meanwhile
                self._inodes[descriptor] = os.fstat(descriptor).st_ino
        elif event == zmq.EVENT_DISCONNECTED:
            self._inodes.pop(descriptor, None)
            route = self._routes.pop(descriptor, None)
            if route is not None or not self._is_chief:
                self._disconnected.append(route)
        self._on_event(event)
        return True

    def _serve_socket(self) -> bool:
        if self._socket is None or not self._ready(self._socket):
            return False
        parts = self._socket.recv_multipart(self._zmq.DONTWAIT, copy=False)
        route = None
        if self._is_chief:
            route = parts.pop(0).bytes
        buffers = [part.buffer for part in parts]
        if self._is_admitted(route):
            self._on_frame(route, _decode(buffers, None))
            return True
        if route is not None:
            self._register_route(route, int(parts[-1].get(self._zmq.SRCFD)))
        # Anybody can connect to the port: garbage is ignored, where from a rank it is an error that ends the job.
        with contextlib.suppress(BadFrame):
            self._on_frame(route, _decode(buffers, UNTRUSTED_LIMIT))
        return True

    def _register_route(self, route: bytes, descriptor: int) -> None:
        """Record the descriptor by which the monitor will report the end of a new connection."""
        # The end of an earlier connection of the same descriptor may still be unread.
        while self._serve_monitor():
            pass
        if descriptor in self._inodes:
            self._routes[descriptor] = route
        else:
            self._disconnected.append(route)

    # closing

    def close(self) -> None:
        """Close the sockets, after up to a second for ZMQ to send its own queue."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._socket.close()
            self._monitor.close(0)
        self._socket = self._monitor = None
        self._context.term()

    def close_in_child(self) -> None:
        """Close the TCP sockets, and only them, in a forked child."""
        # A child's copies would keep the connections of its dead parent open. ZMQ's own objects must not be touched:
        # the threads that they wait for do not exist in a child.
        for descriptor in self._open_descriptors():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open_descriptors(self) -> Iterator[int]:
        for descriptor, inode in self._inodes.items():
            with contextlib.suppress(OSError):
                entry = os.fstat(descriptor)
                # ZMQ may have closed it a moment ago, and the number may belong to another file by now.
                if entry.st_ino == inode and stat.S_ISSOCK(entry.st_mode):
                    yield descriptor


def _decode(parts: list[Any], limit: int | None) -> Frame:
    """Decode a received message.

    Raises:
        BadFrame: If the message is not exactly one frame.
    """
    if not parts:
        raise BadFrame("empty message")
    first = memoryview(parts[0])
    head = decode_head(first, limit)
    if head is None or any(length & IN_MEMORY_FILE for length in head[1]):
        raise BadFrame("incomplete head")
    frame, lengths, begin = head
    body = bytearray().join([first[begin:], *parts[1:]])
    if len(body) != inline_bytes(lengths):
        raise BadFrame("message of the wrong size")
    frame.segments = cut_body(lengths, body, iter(()))
    return frame
