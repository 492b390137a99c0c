"""How the ranks of a job find each other: the chief lets workers in, over a unix socket and over a port.

On one machine they meet at a socket whose path all of them compute alike. The chief holds a lock beside it for as long
as it lives, so a second job with the same key is told who is in its way, and the socket of a chief that died is
replaced. The folder belongs to the user alone (0700, owner checked); on top of that each side asks the kernel who the
other one is, and where there is a secret a worker proves that it knows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from det_core._clock import monotonic
from det_core.errors import RendezvousError
from det_core.ipc._communicator import Communicator
from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Frame, Kind, encode
from det_core.ipc._membership import Peer, some_of, wait_loop
from det_core.ipc._unix_link import UnixLink, peer_credentials
from det_core.ipc._zmq_link import ChiefKey, ZmqLink, ZmqSocket

_PROTOCOL = 4
SOCKET_DIRS = ("/tmp", "/dev/shm", "/var/tmp")
"""Tried in order. Not the platform's temporary folder: that may differ from rank to rank."""
_LOCK_GRACE = 5.0
"""Seconds that a chief waits for the previous one, of a job that is just ending, to let go of the lock."""


class ChiefRendezvous:
    """The chief's side: lets workers in until every rank is there, and turns others away.

    After the constructor and the ``open_`` methods, everything but ``wait`` runs on the ipc thread.
    """

    def __init__(self, communicator: Communicator, secret: str | None, job: str) -> None:
        self._communicator, self._secret, self._job = communicator, secret, job
        self._complete = threading.Event()
        self._unauthenticated: dict[int, UnixLink] = {}
        self._routes: dict[bytes | None, Peer] = {}
        self._lifelines: dict[str, Peer] = {}
        """By token, the peers whose lifeline is still to come."""
        self._lifeline_routes: dict[bytes | None, Peer] = {}
        """By the route of its lifeline, the first rank of each machine."""

    def listen_unix(self, path: str) -> None:
        """Let in those who knock at ``path``.

        Raises:
            RendezvousError: another process is the chief there; the message names it.
        """
        communicator, listener = self._communicator, _Listener(path)
        communicator.on_close += [listener.close, self._close_unauthenticated]
        communicator.on_fork += [listener.close_in_child, self._close_unauthenticated]
        communicator.loop.watch(listener.sock.fileno(), select.EPOLLIN, lambda _events: self._accept(listener))

    def listen_tcp(self, interface: str, port: int, key: ChiefKey | None) -> None:
        """Let in those who connect to ``port`` of this machine.

        Raises:
            RendezvousError: the port is taken.
        """
        self._socket = ZmqSocket(
            self._communicator.loop,
            key,
            on_frame=self._on_frame,
            on_lost=self._on_lost,
            is_admitted=self._routes.__contains__,
        )
        self._socket.bind(interface, port)
        self._communicator.on_close.append(self._socket.close)
        self._communicator.on_fork.append(self._socket.close_in_child)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Return when every rank is there.

        Args:
            check: called at each look: raises when somebody will not come.

        Raises:
            CollectiveTimeout: the star has a timeout, and it has passed.
            PeerLost: a rank died meanwhile.
        """
        communicator = self._communicator

        def missing() -> str:
            ranks = [
                communicator.job_rank(rank) for rank in range(1, communicator.size) if rank not in communicator.peers
            ]
            return f"rank {some_of(ranks, str)}"

        wait_for_all(communicator, self._complete, missing, check)

    # who is let in

    def _refusal(self, hello: Hello, proof: str | None) -> tuple[bool, str] | None:
        """Whether this worker, who is not let in, may come again, and why; None: it is let in."""
        communicator = self._communicator
        if proof is not None and not secrets.compare_digest(hello.proof.encode(errors="replace"), proof.encode()):
            return False, "its DET_CORE_SECRET is not the chief's"
        if hello.protocol != _PROTOCOL:
            return False, f"it speaks protocol {hello.protocol}, the chief {_PROTOCOL}: install one det_core everywhere"
        if hello.job != self._job:
            return False, "it belongs to another job: give this one another pub_port"
        if hello.size != communicator.size:
            return False, f"it was started with size={hello.size}, the chief with size={communicator.size}"
        if not 0 < hello.rank < communicator.size:
            return False, f"rank {hello.rank} is out of range: the job has the ranks 0 to {communicator.size - 1}"
        known = communicator.peers.get(hello.rank)
        if known is None:
            return None
        if known.is_gone or communicator.closing:  # a hello may overtake the goodbye over TCP
            return True, "the previous job with this key is just ending"
        return False, f"rank {hello.rank} is already there: pid {known.pid} on {known.host}"

    def _admit(self, peer: Peer) -> None:
        self._communicator.admit(peer)
        self._complete_if_all_are_there()

    def _complete_if_all_are_there(self) -> None:
        communicator = self._communicator
        if len(communicator.peers) == communicator.size - 1 and not self._lifelines:
            for other in communicator.others():
                other.control.send(encode(Kind.READY))
            self._complete.set()

    def _peer(self, hello: Hello, pid: int, control: UnixLink | ZmqLink, data: UnixLink | None) -> Peer:
        communicator = self._communicator
        return Peer(
            hello.rank, communicator.job_rank(hello.rank), hello.host, pid, control, data, bound=communicator.bound
        )

    # workers of this machine

    def _accept(self, listener: _Listener) -> None:
        try:
            sock, _ = listener.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            return
        nonce = secrets.token_hex(16)
        # It takes little, and drops what the socket cannot take.
        link = UnixLink(sock, watch_writable=lambda _link, _queued: None, limit=UNTRUSTED_LIMIT)
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
                raise BadFrame("no hello")
            hello = Hello.decode(frames[0])
        except BadFrame:
            return self._reject(link)
        refusal = self._refusal(hello, hello_proof(self._secret, nonce, hello.rank))
        if refusal is not None:
            link.send(encode(Kind.REFUSED, body=json.dumps(refusal).encode()))
            return self._reject(link)
        self._forget(link)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(link.sock, [encode(Kind.WELCOME, body=_identity())], [theirs.fileno()])
        except OSError:  # it has died, or waited too long for this and knocks again
            mine.close()
            return link.close()
        data = self._communicator.new_data_link(mine, hello.rank)
        self._admit(self._peer(hello, pid or hello.pid, self._communicator.new_link(link.sock), data))

    def _reject(self, link: UnixLink) -> None:
        self._forget(link)
        link.close()

    def _forget(self, link: UnixLink) -> None:
        if self._unauthenticated.pop(link.fd, None) is not None:
            self._communicator.loop.unwatch(link.fd)

    def _close_unauthenticated(self) -> None:
        for link in self._unauthenticated.values():
            link.close()
        self._unauthenticated.clear()

    # workers of other machines

    def _on_frame(self, route: bytes | None, frame: Frame) -> None:
        peer = self._routes.get(route)
        if peer is not None:
            # ZMQ sends what a connection has not taken over the next one, where the worker says hello anew
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
        peer = self._routes[route] = self._peer(hello, hello.pid, link, None)
        if hello.lifeline:
            self._lifelines[hello.lifeline] = peer
        link.send(encode(Kind.WELCOME, body=_identity()))
        self._admit(peer)

    def _on_lifeline(self, route: bytes | None, frame: Frame) -> None:
        """Take this connection for the lifeline of the peer whose token it brings."""
        token = b"".join(frame.segments).decode(errors="replace")
        if (peer := self._lifelines.pop(token, None)) is not None:
            self._lifeline_routes[route] = peer
            self._complete_if_all_are_there()

    def _on_lost(self, route: bytes | None) -> None:
        if route in self._routes:
            self._communicator.on_disconnect(self._routes[route])
        elif (peer := self._lifeline_routes.get(route)) is not None and isinstance(peer.control, ZmqLink):
            peer.control.when_silent(lambda: self._lose_host(peer))

    def _lose_host(self, first: Peer) -> None:
        """Take all ranks of a machine for lost, the one with the lifeline first: none of them can be told of it."""
        for peer in (first, *self._communicator.others()):
            if peer.host == first.host and isinstance(peer.control, ZmqLink):
                self._communicator.on_disconnect(peer)


def wait_for_all(
    communicator: Communicator,
    event: threading.Event,
    waiting_for: Callable[[], str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait for ``event`` of the rendezvous as long as everybody who is there lives; for both sides."""

    def look() -> None:
        check()
        departed = communicator.others(departed=True)
        if departed and not event.is_set():  # looked at in this order: who is ready may say goodbye at once
            communicator.abort_lost(departed[0])
        communicator.raise_if_aborted()

    waits = wait_loop(
        event.is_set,
        communicator.label,
        lambda: "the rendezvous",
        waiting_for,
        timeout=communicator.timeout,
        check=look,
    )
    for seconds in waits:
        event.wait(seconds)


def _identity() -> bytes:
    return json.dumps([socket.gethostname(), os.getpid()]).encode()


@dataclass(frozen=True)
class Hello:
    """Who a worker says it is."""

    rank: int
    size: int
    host: str
    pid: int
    job: str = ""
    protocol: int = _PROTOCOL
    proof: str = ""
    lifeline: str = ""
    """Token that a second connection will bring; empty: none will."""

    def encode(self) -> bytes:
        """For the wire: JSON, because the reader does not trust the writer yet."""
        return json.dumps(self.__dict__).encode()

    @classmethod
    def decode(cls, frame: Frame) -> Hello:
        """From the wire.

        Raises:
            BadFrame: it is none.
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
        raise BadFrame("a hello that is none")


def hello_proof(secret: str | None, nonce: str, rank: int) -> str:
    """What a worker that knows ``secret`` answers to the chief's ``nonce``."""
    if secret is None:
        return ""
    return hmac.new(secret.encode(), f"det_core hello {nonce} {rank}".encode(), "sha256").hexdigest()


def rendezvous_path(key: tuple[str, ...]) -> str:
    """The socket of the job that ``key`` describes, in a folder that only this user can enter."""
    digest = hashlib.sha256("\0".join(("det_core", str(os.getuid()), *key)).encode()).hexdigest()[:32]
    return f"{_private_folder()}/{digest}"


def _private_folder() -> str:
    refused = []
    for parent in SOCKET_DIRS:
        path = f"{parent}/det_core-{os.getuid()}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            refused.append(f"{path}: {e.strerror}")
            continue
        entry = os.lstat(path)
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid():
            refused.append(f"{path}: belongs to user {entry.st_uid}, or is no folder")
            continue
        if stat.S_IMODE(entry.st_mode) != 0o700:
            os.chmod(path, 0o700)
        return path
    raise RendezvousError(f"no folder of this user's own for a socket between the ranks: {'; '.join(refused)}")


class _Listener:
    """The chief's listening socket and the lock that goes with it.

    Raises:
        RendezvousError: another process holds the lock; the message names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path + ".sock"
        self._lock_path = path + ".lock"
        self._lock = self._take_lock()
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                _unlink(self.path)
                self.sock.bind(self.path)
                os.chmod(self.path, 0o600)
                self.sock.listen(512)
            except BaseException:
                self.sock.close()
                raise
        except BaseException:
            os.close(self._lock)
            raise

        _remove_stale_sockets(os.path.dirname(path))

    def _take_lock(self) -> int:
        began = monotonic()
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == os.stat(self._lock_path).st_ino:
                    os.ftruncate(fd, 0)
                    os.write(fd, str(os.getpid()).encode())
                    return fd
            except FileNotFoundError:
                pass
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                holder = os.pread(fd, 32, 0).decode() or "unknown"
                if holder == str(os.getpid()) or monotonic() - began > _LOCK_GRACE:
                    os.close(fd)
                    raise RendezvousError(_held(holder, self._lock_path)) from None
            os.close(fd)
            time.sleep(0.02)

    def close(self) -> None:
        """Stop listening and remove the files. Only the holder of the lock removes them, so no new chief's are."""
        self.sock.close()
        _unlink(self.path)
        _unlink(self._lock_path)
        os.close(self._lock)

    def close_in_child(self) -> None:
        """Close the descriptors only: in a forked child."""
        self.sock.close()
        os.close(self._lock)


def _remove_stale_sockets(folder: str) -> None:
    """Remove what chiefs that were killed have left: the files of locks that nobody holds."""
    for name in os.listdir(folder):
        if not name.endswith(".lock"):
            continue
        path = f"{folder}/{name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                _unlink(path.removesuffix(".lock") + ".sock")
                _unlink(path)
        except OSError:  # held, or just removed by another
            continue
        finally:
            os.close(fd)


def _held(holder: str, path: str) -> str:
    whose = "this process" if holder == str(os.getpid()) else f"process {holder}"
    return (
        f"{whose} is already the chief of a job with the same key (lock {path}). Close that DistributedContext first; "
        "if it is another job on this machine, give each a pub_port of its own: DistributedContext(…, pub_port=12361) "
        "or export INTER_TRAIN_PROCESS_COMM_PORT_1=12361"
    )


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
