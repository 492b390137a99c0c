"""Rendezvous on the chief: admit workers over a unix socket and over a TCP port until every rank is connected."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from det_core.ipc._communicator import Communicator
from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Frame, Kind, encode
from det_core.ipc._listener import Listener
from det_core.ipc._membership import some_of
from det_core.ipc._peer import Peer
from det_core.ipc._unix_link import UnixLink, peer_credentials
from det_core.ipc._zmq_link import ChiefKey, ZmqLink, ZmqSocket

_PROTOCOL = 4
"""Version of the messages between ranks."""


class ChiefRendezvous:
    """Admission of workers on the chief.

    The directory of the unix socket belongs to this user alone (0700, owner checked), each side asks the kernel for the
    user of the other one, and a worker proves that it knows the secret, if there is one.

    After the constructor and the ``listen_`` methods, everything except ``wait`` runs on the ipc thread.

    Args:
        communicator: communicator of the chief, to which workers are added.
        secret: secret of the job, or None.
        job: digest of the job's key; workers with another one are refused.
    """

    def __init__(self, communicator: Communicator, secret: str | None, job: str) -> None:
        self._communicator = communicator
        self._secret = secret
        self._job = job
        self._complete = threading.Event()
        self._unauthenticated: dict[int, UnixLink] = {}
        """By descriptor, the connections without a HELLO."""
        self._routes: dict[bytes | None, Peer] = {}
        """By route, the admitted workers of other nodes."""
        self._lifelines: dict[str, Peer] = {}
        """By token, the peers whose lifeline is still to connect."""
        self._lifeline_routes: dict[bytes | None, Peer] = {}
        """By the route of its lifeline, the first rank of each node."""

    def listen_unix(self, path: str) -> None:
        """Admit workers that connect to the socket at ``path``.

        Raises:
            RendezvousError: If another process is the chief there; the message names it.
        """
        listener = Listener(path)
        communicator = self._communicator
        communicator.on_close += [listener.close, self._close_unauthenticated]
        communicator.on_fork += [listener.close_in_child, self._close_unauthenticated]
        communicator.loop.watch(listener.sock.fileno(), select.EPOLLIN, lambda _events: self._accept(listener))

    def listen_tcp(self, interface: str, port: int, key: ChiefKey | None) -> None:
        """Admit workers that connect to ``port`` of this node.

        Raises:
            RendezvousError: If the port is taken.
        """
        self._socket = ZmqSocket(
            self._communicator.loop,
            key,
            on_frame=self._on_frame,
            on_disconnect=self._on_disconnect,
            is_admitted=self._routes.__contains__,
        )
        self._socket.bind(interface, port)
        self._communicator.on_close.append(self._socket.close)
        self._communicator.on_fork.append(self._socket.close_in_child)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Return once every rank is connected.

        Args:
            check: called at each poll; raises if a rank will never connect.

        Raises:
            CollectiveTimeout: At the communicator's deadline, if it has one.
            PeerLost: If a rank died meanwhile.
        """
        communicator = self._communicator

        def missing() -> str:
            unconnected = [rank for rank in range(1, communicator.size) if rank not in communicator.peers]
            return f"rank {some_of([communicator.job_rank(rank) for rank in unconnected], str)}"

        wait_for_all(communicator, self._complete, missing, check)

    # admission

    def _refusal(self, hello: Hello, proof: str | None) -> tuple[bool, str] | None:
        """Return whether a refused worker may retry, and the reason; None if it is admitted.

        ``proof`` is the expected one, or None over TCP, where CURVE has authenticated the worker.
        """
        communicator = self._communicator
        # First: a worker without the secret must learn nothing else about the job.
        if proof is not None and not secrets.compare_digest(hello.proof.encode(errors="replace"), proof.encode()):
            return False, "its DET_CORE_SECRET differs from the chief's"
        if hello.protocol != _PROTOCOL:
            return False, f"it uses protocol {hello.protocol}, the chief {_PROTOCOL}: install one det_core everywhere"
        if hello.job != self._job:
            return False, "it belongs to another job: give this one another pub_port"
        if hello.size != communicator.size:
            return False, f"it was started with size={hello.size}, the chief with size={communicator.size}"
        if not 0 < hello.rank < communicator.size:
            return False, f"rank {hello.rank} is out of range: the job has the ranks 0 to {communicator.size - 1}"
        known = communicator.peers.get(hello.rank)
        if known is None:
            return None
        # Over TCP a HELLO for the next job may overtake the GOODBYE of the last one.
        if known.is_gone or communicator.closing:
            return True, "the previous job with this key is just ending"
        return False, f"rank {hello.rank} is already connected: pid {known.pid} on {known.host}"

    def _admit(self, peer: Peer) -> None:
        self._communicator.admit(peer)
        self._complete_if_all_connected()

    def _complete_if_all_connected(self) -> None:
        communicator = self._communicator
        if len(communicator.peers) == communicator.size - 1 and not self._lifelines:
            for other in communicator.others():
                other.control.send(encode(Kind.READY))
            self._complete.set()

    def _new_peer(self, hello: Hello, pid: int, control: UnixLink | ZmqLink, data: UnixLink | None) -> Peer:
        communicator = self._communicator
        job_rank = communicator.job_rank(hello.rank)
        bound = communicator.max_in_flight
        return Peer(hello.rank, job_rank, hello.host, pid, control, data, max_in_flight=bound)

    # workers of this node

    def _accept(self, listener: Listener) -> None:
        try:
            sock, _ = listener.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            return
        nonce = secrets.token_hex(16)
        # Nothing flushes the queue of this link: its two frames fit into the socket, or the peer does not read.
        link = UnixLink(sock, watch_writable=lambda _link, _is_queued: None, limit=UNTRUSTED_LIMIT)
        self._unauthenticated[link.fd] = link
        self._communicator.loop.watch(
            link.fd, select.EPOLLIN, lambda _events: self._on_unauthenticated(link, nonce, pid)
        )
        link.send(encode(Kind.CHALLENGE, body=nonce.encode()))

    def _on_unauthenticated(self, link: UnixLink, nonce: str, pid: int) -> None:
        try:
            frames = link.receive()
            if not frames and not link.eof:
                return
            if link.eof:
                raise BadFrame("closed without a HELLO")
            hello = Hello.decode(frames[0])
        except BadFrame:
            return self._reject(link)
        refusal = self._refusal(hello, hello_proof(self._secret, nonce, hello.rank))
        if refusal is not None:
            link.send(encode(Kind.REFUSED, body=json.dumps(refusal).encode()))
            return self._reject(link)
        self._unwatch(link)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(link.sock, [encode(Kind.WELCOME, body=_identity())], [theirs.fileno()])
        except OSError:  # the worker died, or its handshake timed out and it connects again
            own.close()
            return link.close()
        data = self._communicator.new_data_link(own, hello.rank)
        self._admit(self._new_peer(hello, pid or hello.pid, self._communicator.new_link(link.sock), data))

    def _reject(self, link: UnixLink) -> None:
        self._unwatch(link)
        link.close()

    def _unwatch(self, link: UnixLink) -> None:
        if self._unauthenticated.pop(link.fd, None) is not None:
            self._communicator.loop.unwatch(link.fd)

    def _close_unauthenticated(self) -> None:
        for link in self._unauthenticated.values():
            link.close()
        self._unauthenticated.clear()

    # workers of other nodes

    def _on_frame(self, route: bytes | None, frame: Frame) -> None:
        peer = self._routes.get(route)
        if peer is not None:
            # ZMQ sends a HELLO that a lost connection left unsent over the next one, for which another was queued.
            if not peer.dead and frame.kind != Kind.HELLO:
                self._communicator.dispatch(peer, frame)
            return
        if frame.kind == Kind.LIFELINE:
            return self._on_lifeline(route, frame)
        hello = Hello.decode(frame)
        link = ZmqLink(self._socket, route)
        refusal = self._refusal(hello, None)
        if refusal is not None:
            link.send(encode(Kind.REFUSED, body=json.dumps(refusal).encode()))
            return link.flush()
        peer = self._routes[route] = self._new_peer(hello, hello.pid, link, None)
        if hello.lifeline:
            self._lifelines[hello.lifeline] = peer
        link.send(encode(Kind.WELCOME, body=_identity()))
        self._admit(peer)

    def _on_lifeline(self, route: bytes | None, frame: Frame) -> None:
        """Record this connection as the lifeline of the peer with its token."""
        token = b"".join(frame.segments).decode(errors="replace")
        if (peer := self._lifelines.pop(token, None)) is not None:
            self._lifeline_routes[route] = peer
            self._complete_if_all_connected()

    def _on_disconnect(self, route: bytes | None) -> None:
        if route in self._routes:
            self._communicator.on_disconnect(self._routes[route])
        elif (peer := self._lifeline_routes.get(route)) is not None and isinstance(peer.control, ZmqLink):
            peer.control.when_silent(lambda: self._lose_node(peer))

    def _lose_node(self, first: Peer) -> None:
        """Handle the loss of a node: of all its ranks, the one with the lifeline first."""
        # All of them, as none can acknowledge the abort, which would wait for those that still look alive.
        for peer in (first, *self._communicator.others()):
            if peer.host == first.host and isinstance(peer.control, ZmqLink):
                self._communicator.on_disconnect(peer)


def wait_for_all(
    communicator: Communicator,
    event: threading.Event,
    waiting_for: Callable[[], str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait for ``event``, the end of the rendezvous, for as long as all connected ranks live; on both sides."""

    def check_peers() -> None:
        check()
        # The event after the departures: a rank that is ready may close at once.
        departed = [peer for peer in list(communicator.peers.values()) if peer.departed]
        if departed and not event.is_set():
            communicator.abort_lost(departed[0])
        communicator.raise_if_aborted()

    for seconds in communicator.wait_loop(
        event.is_set, lambda: "the rendezvous", waiting_for, timeout=communicator.timeout, check=check_peers
    ):
        event.wait(seconds)


def _identity() -> bytes:
    return json.dumps([socket.gethostname(), os.getpid()]).encode()


@dataclass(frozen=True)
class Hello:
    """A worker's first message, with its identity."""

    rank: int
    size: int
    host: str
    pid: int
    job: str = ""
    protocol: int = _PROTOCOL
    proof: str = ""
    lifeline: str = ""
    """Token of a second connection, or "" if there will be none."""

    def encode(self) -> bytes:
        """Encode it for the wire, as JSON: to unpickle it would run an unauthenticated sender's code."""
        return json.dumps(self.__dict__).encode()

    @classmethod
    def decode(cls, frame: Frame) -> Hello:
        """Decode it from the wire.

        Raises:
            BadFrame: If the frame is not a valid HELLO.
        """
        try:
            (body,) = frame.segments
            hello = cls(**json.loads(bytes(body)))
            numbers = (hello.rank, hello.size, hello.pid, hello.protocol)
            texts = (hello.host, hello.job, hello.proof, hello.lifeline)
            if frame.kind == Kind.HELLO and all(type(n) is int for n in numbers) and all(type(t) is str for t in texts):
                return hello
        except (ValueError, TypeError, RecursionError):
            pass
        raise BadFrame("invalid HELLO")


def hello_proof(secret: str | None, nonce: str, rank: int) -> str:
    """Return the HMAC of a nonce."""
    if secret is None:
        return ""
    return hmac.new(secret.encode(), f"det_core hello {nonce} {rank}".encode(), "sha256").hexdigest()
