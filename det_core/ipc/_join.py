"""Rendezvous on a worker: connect to the chief, and wait until every rank is connected."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from det_core.errors import RendezvousError
from det_core.ipc._communicator import Communicator
from det_core.ipc._frames import UNTRUSTED_LIMIT, Frame, FrameDecoder, Kind, encode
from det_core.ipc._peer import Peer
from det_core.ipc._rendezvous import Hello, hello_proof, wait_for_all
from det_core.ipc._unix_link import peer_credentials
from det_core.ipc._zmq_link import ChiefKey, ZmqLink, ZmqSocket

_HANDSHAKE_TIMEOUT = 10.0
_MAX_FAILED_HANDSHAKES = 3
"""Failed CURVE handshakes in a row after which the secret is taken for the cause, not the network."""
_RETRY_DELAY = 0.2
_MAX_RETRY_DELAY = 0.05
_OTHERS = "other ranks, as the chief does"
"""Description, for messages, of the ranks that an admitted worker waits for."""


def join_unix(
    communicator: Communicator, path: str, secret: str | None, job: str, check: Callable[[], None] = lambda: None
) -> None:
    """Join the chief of this node; return once every rank is connected.

    Args:
        communicator: communicator of this rank.
        path: path of the chief's socket, without suffix.
        secret: secret of the job, or None.
        job: digest of the job's key.
        check: called at each attempt; raises if the chief will never listen.

    Raises:
        RendezvousError: If the chief refuses this rank, or the socket belongs to another user.
    """
    connections: list[_Connection] = []
    pause = 0.002

    def hello(nonce: str) -> Hello:
        return _hello(communicator, job, hello_proof(secret, nonce, communicator.rank))

    def waiting_for() -> str:
        return f"the chief: no chief at {path}.sock yet"

    for seconds in communicator.wait_loop(
        connections.__len__, lambda: "the rendezvous", waiting_for, timeout=communicator.timeout, check=check
    ):
        connection = _try_connect(communicator, path, hello)
        if connection is None:
            time.sleep(min(seconds, pause))
            pause = min(1.5 * pause, _MAX_RETRY_DELAY)
        else:
            connections.append(connection)
    ((sock, data, host, pid),) = connections
    chief = Peer(
        0,
        communicator.job_rank(0),
        host,
        pid,
        communicator.new_link(sock),
        communicator.new_data_link(data, 0),
        max_in_flight=communicator.max_in_flight,
    )
    ready = threading.Event()
    communicator.on_ready = ready.set
    communicator.call_soon(lambda: communicator.admit(chief))
    wait_for_all(communicator, ready, lambda: _OTHERS)


_Connection = tuple[socket.socket, socket.socket, str, int]
"""The control socket, the user channel's socket, and the chief's host and pid."""


def _try_connect(communicator: Communicator, path: str, hello: Callable[[str], Hello]) -> _Connection | None:
    """Connect to the chief and authenticate; return None if it does not listen yet, or this rank is to retry.

    Args:
        communicator: communicator of this rank.
        path: path of the chief's socket, without suffix.
        hello: called with the chief's nonce.
    """
    with contextlib.ExitStack() as on_return:
        sock = on_return.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(_HANDSHAKE_TIMEOUT)
        try:
            sock.connect(path + ".sock")
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError):
            return None
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            raise RendezvousError(f"{path}.sock belongs to a process of user {uid}, not of this user")
        try:
            challenge, _ = _read_frame(sock)
            sock.sendall(encode(Kind.HELLO, body=hello(bytes(challenge.segments[0]).decode()).encode()))
            reply, fds = _read_frame(sock)
        except (ConnectionError, TimeoutError):
            return None
        content = json.loads(bytes(reply.segments[0]))
        if reply.kind == Kind.WELCOME and len(fds) == 1:
            host, chief_pid = content
            data = socket.socket(fileno=fds[0])
            on_return.pop_all()  # the socket stays open
            return sock, data, host, pid or chief_pid
        if reply.kind != Kind.REFUSED:
            raise RendezvousError("invalid reply of the chief to HELLO: do all ranks run the same det_core?")
        may_retry, reason = content
        if not may_retry:
            raise RendezvousError(_refused(communicator, reason))
        return None


def _read_frame(sock: socket.socket) -> tuple[Frame, list[int]]:
    """Read one frame, and return it with the descriptors that came with it."""
    decoder = FrameDecoder(UNTRUSTED_LIMIT)
    fds: list[int] = []
    while True:
        # Byte by byte: anything beyond the frame is for the link that takes over the socket.
        data, new, _, _ = socket.recv_fds(sock, 1, 4, socket.MSG_CMSG_CLOEXEC)
        fds += new
        if not data:
            raise ConnectionResetError("the chief closed the connection during the handshake")
        decoder.buffer()[:1] = data
        for frame, _lengths, body in decoder.received(1):
            frame.segments = [body]
            return frame, fds


def join_remote(
    communicator: Communicator, host: str, port: int, key: ChiefKey | None, job: str, *, lifeline: bool
) -> None:
    """Join the chief of another node; return once every rank is connected.

    Args:
        communicator: communicator of this rank.
        host: name or address of the chief's node.
        port: port of the chief.
        key: keys derived from the secret, or None for unencrypted connections.
        job: digest of the job's key.
        lifeline: whether to open the connection that shows whether the two nodes reach each other.

    Raises:
        RendezvousError: If the chief refuses this rank, or has another secret.
    """
    join = _RemoteJoin(communicator, host, port, key, job, lifeline=lifeline)
    wait_for_all(communicator, join.ended, join.waiting_for)
    if join.refusal is not None:
        raise RendezvousError(join.refusal)


class _RemoteJoin:
    """Handshake with a chief over TCP: a HELLO for every new connection until the chief replies.

    Everything except the constructor runs on the ipc thread.
    """

    def __init__(
        self, communicator: Communicator, host: str, port: int, key: ChiefKey | None, job: str, *, lifeline: bool
    ) -> None:
        import zmq

        self.ended = threading.Event()
        self.refusal: str | None = None
        self._zmq = zmq
        self._communicator = communicator
        self._job = job
        self._host = host
        self._port = port
        self._key = key
        self._address = f"{host}:{port}"
        if ":" in host:
            self._address = f"[{host}]:{port}"
        self._ipv6 = self._needs_ipv6()
        self._lifeline = ""
        if lifeline:
            self._lifeline = secrets.token_hex(8)
        self._chief: Peer | None = None
        self._failed_handshakes = 0
        communicator.on_ready = self.ended.set
        chief = self._open(self._on_frame, self._on_disconnect, self._on_event)
        self._link = ZmqLink(chief, None)
        # Last: the ipc thread may receive its first event, and send by the link, before this returns.
        chief.connect(host, port, ipv6=self._ipv6)

    def _needs_ipv6(self) -> bool:
        """Wait until the chief's name is known, and return whether to connect to it by IPv6."""
        families: list[socket.AddressFamily] = []

        def is_known() -> bool:
            family = _family_of(self._host, self._port)
            if family is not None:
                families.append(family)
            return bool(families)

        def waiting_for() -> str:
            return f"the name of the chief, {self._host}, which is unknown on this node"

        communicator = self._communicator
        for seconds in communicator.wait_loop(
            is_known, lambda: "the rendezvous", waiting_for, timeout=communicator.timeout
        ):
            time.sleep(min(seconds, _RETRY_DELAY))
        return families[0] == socket.AF_INET6

    def _open(
        self,
        on_frame: Callable[[Frame], None],
        on_disconnect: Callable[[], None],
        on_event: Callable[[int], None] = lambda _event: None,
    ) -> ZmqSocket:
        communicator = self._communicator
        connection = ZmqSocket(
            communicator.loop,
            self._key,
            on_frame=lambda _route, frame: on_frame(frame),
            on_disconnect=lambda _route: on_disconnect(),
            on_event=on_event,
        )
        communicator.on_close.append(connection.close)
        communicator.on_fork.append(connection.close_in_child)
        return connection

    def waiting_for(self) -> str:
        """Return the name of the rank that this one waits for, for messages."""
        if self._chief is None:
            return f"the chief at {self._address} to answer"
        return _OTHERS

    def _on_event(self, event: int) -> None:
        zmq = self._zmq
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failed_handshakes = 0
            self._say_hello()
        elif event & (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        ):
            self._failed_handshakes += 1
            if self._failed_handshakes >= _MAX_FAILED_HANDSHAKES and self._chief is None:
                self._give_up(
                    f"the chief at {self._address} refuses the connection: DET_CORE_SECRET (or DET_SESSION_TOKEN) "
                    "differs between the two nodes, or another program listens there"
                )

    def _say_hello(self) -> None:
        if self._chief is None:
            hello = _hello(self._communicator, self._job, lifeline=self._lifeline)
            self._link.send(encode(Kind.HELLO, rank=self._communicator.rank, body=hello.encode()))

    def _on_frame(self, frame: Frame) -> None:
        communicator = self._communicator
        if self._chief is not None:
            communicator.dispatch(self._chief, frame)
        elif frame.kind == Kind.WELCOME:
            host, pid = json.loads(bytes(frame.segments[0]))
            bound = communicator.max_in_flight
            self._chief = Peer(0, communicator.job_rank(0), host, pid, self._link, None, max_in_flight=bound)
            communicator.admit(self._chief)
            if self._lifeline:
                lifeline = self._open(lambda _frame: None, lambda: self._link.when_silent(self._on_disconnect))
                lifeline.connect(self._host, self._port, ipv6=self._ipv6)
                hello = encode(Kind.LIFELINE, rank=communicator.rank, body=self._lifeline.encode())
                ZmqLink(lifeline, None).send(hello)
        elif frame.kind == Kind.REFUSED:
            may_retry, reason = json.loads(bytes(frame.segments[0]))
            if may_retry:
                communicator.loop.call_later(_RETRY_DELAY, self._say_hello)
            else:
                self._give_up(_refused(communicator, reason))

    def _on_disconnect(self) -> None:
        # Before the WELCOME it is a connection that failed, which ZMQ retries.
        if self._chief is not None:
            self._communicator.on_disconnect(self._chief)

    def _give_up(self, reason: str) -> None:
        self.refusal = reason
        self.ended.set()


def _family_of(host: str, port: int) -> socket.AddressFamily | None:
    """Return the address family by which ``host`` is reachable, IPv4 if both are, or None if its name is unknown."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    # ZMQ finds no IPv6 address where IPv4 is asked for, and a name with both may be unreachable by IPv6. The kernel
    # knows: to connect a datagram socket fails without a route, and sends nothing.
    for family, kind, protocol, _, address in sorted(addresses, key=lambda entry: entry[0]):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return family
    return socket.AF_INET


def _hello(communicator: Communicator, job: str, proof: str = "", lifeline: str = "") -> Hello:
    host = socket.gethostname()
    return Hello(communicator.rank, communicator.size, host, os.getpid(), job=job, proof=proof, lifeline=lifeline)


def _refused(communicator: Communicator, reason: str) -> str:
    return f"the chief refused {communicator.label}: {reason}"
