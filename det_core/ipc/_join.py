"""A worker's side of the rendezvous: finding the chief and being let in."""

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
from det_core.ipc._membership import Peer, wait_loop
from det_core.ipc._rendezvous import Hello, hello_proof, wait_for_all
from det_core.ipc._unix_link import peer_credentials
from det_core.ipc._zmq_link import ChiefKey, ZmqLink, ZmqSocket

_HANDSHAKE_TIMEOUT = 10.0
_REFUSED_BY_CURVE = 3
"""Failed handshakes in a row after which the secret, not the network, is to blame."""
_RETRY_DELAY = 0.2
_MAX_RETRY_DELAY = 0.05


def join_unix(
    communicator: Communicator, path: str, secret: str | None, job: str, check: Callable[[], None] = lambda: None
) -> None:
    """Join the chief of this machine; returns when every rank is there.

    Args:
        check: called at each look for the chief: raises when it will not come.

    Raises:
        RendezvousError: the chief does not let this rank in, or whoever listens there is not this user.
    """
    found: list[_Answer] = []
    pause = 0.002

    def hello(nonce: str) -> Hello:
        return _hello(communicator, job, hello_proof(secret, nonce, communicator.rank))

    def waiting_for() -> str:
        return f"the chief: no chief at {path}.sock yet"

    for seconds in wait_loop(
        found.__len__,
        communicator.label,
        lambda: "the rendezvous",
        waiting_for,
        timeout=communicator.timeout,
        check=check,
    ):
        if (answer := _try_connect(communicator, path, hello)) is None:
            time.sleep(min(seconds, pause))
            pause = min(1.5 * pause, _MAX_RETRY_DELAY)
        else:
            found.append(answer)
    ((sock, data, host, pid),) = found
    chief = Peer(
        0,
        communicator.job_rank(0),
        host,
        pid,
        communicator.new_link(sock),
        communicator.new_data_link(data, 0),
        bound=communicator.bound,
    )
    ready = threading.Event()
    communicator.on_ready = ready.set
    communicator.call_soon(lambda: communicator.admit(chief))
    wait_for_all(communicator, ready, lambda: "other ranks, as the chief does")


_Answer = tuple[socket.socket, socket.socket, str, int]
"""The control socket, the user lane's socket, and the chief's host and pid."""


def _try_connect(communicator: Communicator, path: str, hello: Callable[[str], Hello]) -> _Answer | None:
    """Connect to the chief and introduce this process with the hello for the chief's nonce; None: nobody there yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_HANDSHAKE_TIMEOUT)
        try:
            sock.connect(path + ".sock")
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError):
            sock.close()
            return None
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            raise RendezvousError(f"{path}.sock belongs to a process of user {uid}, not to this user")
        try:
            challenge, _ = _read_one(sock)
            sock.sendall(encode(Kind.HELLO, body=hello(bytes(challenge.segments[0]).decode()).encode()))
            answer, fds = _read_one(sock)
        except (ConnectionError, TimeoutError):
            sock.close()
            return None
        told = json.loads(bytes(answer.segments[0]))
        if answer.kind == Kind.WELCOME and len(fds) == 1:
            return sock, socket.socket(fileno=fds[0]), told[0], pid or told[1]
        if answer.kind != Kind.REFUSED:
            raise RendezvousError("the chief's answer to the hello makes no sense: do all ranks run the same det_core?")
        again, reason = told
        if not again:
            raise RendezvousError(_refused(communicator, reason))
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _read_one(sock: socket.socket) -> tuple[Frame, list[int]]:
    """Read one frame and not a byte more; with it the descriptors that came along."""
    decoder, fds = FrameDecoder(UNTRUSTED_LIMIT), []
    while True:
        data, new, _, _ = socket.recv_fds(sock, 1, 4, socket.MSG_CMSG_CLOEXEC)
        fds += new
        if not data:
            raise ConnectionResetError("the other end closed during the handshake")
        decoder.buffer()[:1] = data
        for frame, _lengths, body in decoder.received(1):
            frame.segments = [body]
            return frame, fds


def join_remote(
    communicator: Communicator, host: str, port: int, key: ChiefKey | None, job: str, *, lifeline: bool
) -> None:
    """Join the chief of another machine; returns when every rank is there.

    Args:
        star: of this rank.
        host: name or address of the chief.
        port: where it listens.
        key: made from the secret; None: in clear text.
        job: the job, as its ranks name it.
        lifeline: whether to hold the connection that shows that the two machines reach each other.

    Raises:
        RendezvousError: the chief does not let this rank in, or has another secret.
    """
    join = _RemoteJoin(communicator, host, port, key, job, lifeline=lifeline)
    wait_for_all(communicator, join.ended, join.waiting_for)
    if join.refusal is not None:
        raise RendezvousError(join.refusal)


class _RemoteJoin:
    """Says hello at every new connection until the chief answers. On the ipc thread, after the constructor."""

    def __init__(
        self, communicator: Communicator, host: str, port: int, key: ChiefKey | None, job: str, *, lifeline: bool
    ) -> None:
        import zmq

        self.ended = threading.Event()
        self.refusal: str | None = None
        self._communicator, self._job, self._zmq = communicator, job, zmq
        self._host, self._port, self._key = host, port, key
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._ipv6 = self._needs_ipv6()
        self._lifeline = secrets.token_hex(8) if lifeline else ""
        self._chief: Peer | None = None
        self._failures = 0
        communicator.on_ready = self.ended.set
        self._link = self._connect(self._on_frame, self._on_lost, self._on_event)

    def _needs_ipv6(self) -> bool:
        """Wait until the name of the chief is known; return whether it is reached by IPv6."""
        families: list[socket.AddressFamily] = []

        def look() -> bool:
            family = _family_of(self._host, self._port)
            if family is not None:
                families.append(family)
            return bool(families)

        def waiting_for() -> str:
            return f"the name of the chief, {self._host}, which is not known on this machine"

        communicator = self._communicator
        for seconds in wait_loop(
            look, communicator.label, lambda: "the rendezvous", waiting_for, timeout=communicator.timeout
        ):
            time.sleep(min(seconds, _RETRY_DELAY))
        return families[0] == socket.AF_INET6

    def _connect(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[], None],
        on_event: Callable[[int], None] = lambda _event: None,
    ) -> ZmqLink:
        communicator = self._communicator
        connection = ZmqSocket(
            communicator.loop,
            self._key,
            on_frame=lambda _route, frame: on_frame(frame),
            on_lost=lambda _route: on_lost(),
            on_event=on_event,
        )
        communicator.on_close.append(connection.close)
        communicator.on_fork.append(connection.close_in_child)
        connection.connect(self._host, self._port, ipv6=self._ipv6)
        return ZmqLink(connection, None)

    def waiting_for(self) -> str:
        """For whom it waits."""
        return f"the chief at {self._address} to answer" if self._chief is None else "other ranks, as the chief does"

    def _on_event(self, event: int) -> None:
        zmq = self._zmq
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            self._say_hello()
        elif event & (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        ):
            self._failures += 1
            if self._failures >= _REFUSED_BY_CURVE and self._chief is None:
                self._give_up(
                    f"the chief at {self._address} refuses the connection: DET_CORE_SECRET (or DET_SESSION_TOKEN) is "
                    "not the same on both machines, or something else listens there"
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
            self._chief = Peer(0, communicator.job_rank(0), host, pid, self._link, None, bound=communicator.bound)
            communicator.admit(self._chief)
            if self._lifeline:
                lifeline = self._connect(lambda _frame: None, lambda: self._link.when_silent(self._on_lost))
                lifeline.send(encode(Kind.LIFELINE, rank=communicator.rank, body=self._lifeline.encode()))
        elif frame.kind == Kind.REFUSED:
            again, reason = json.loads(bytes(frame.segments[0]))
            if again:
                communicator.loop.call_later(_RETRY_DELAY, self._say_hello)
            else:
                self._give_up(_refused(communicator, reason))

    def _on_lost(self) -> None:
        if self._chief is not None:
            self._communicator.on_disconnect(self._chief)

    def _give_up(self, why: str) -> None:
        self.refusal = why
        self.ended.set()


def _family_of(host: str, port: int) -> socket.AddressFamily | None:
    """Return the address family by which ``host`` can be reached, IPv4 where both can; None: its name is not known.

    A name that has only IPv6 addresses is not found where one asks for IPv4, and one that has both need not be
    reachable by IPv6, or not from here: the kernel knows whether it has a route.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    for family, kind, protocol, _, address in sorted(addresses, key=lambda entry: entry[0]):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return family
    return socket.AF_INET


def _hello(communicator: Communicator, job: str, proof: str = "", lifeline: str = "") -> Hello:
    return Hello(
        communicator.rank, communicator.size, socket.gethostname(), os.getpid(), job=job, proof=proof, lifeline=lifeline
    )


def _refused(communicator: Communicator, reason: str) -> str:
    return f"the chief does not let {communicator.label} in: {reason}"
