"""From rank numbers to connected stars: the rendezvous of a job."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from det_core._errors import CollectiveTimeout, RendezvousError
from det_core.ipc._frames import BadFrame, Kind, encode
from det_core.ipc._lane import Lane
from det_core.ipc._link import UnixLink
from det_core.ipc._liveness import Patience
from det_core.ipc._peer import Peer
from det_core.ipc._rendezvous import PROTOCOL, Door, Hello, Refused, knock, peer_credentials, prove, rendezvous_path
from det_core.ipc._star import QUEUE_BOUND, Star


class Assembly:
    """The chief's side: lets workers in until every rank is there, and turns others away.

    Everything but ``wait`` runs on the ipc thread.
    """

    def __init__(self, star: Star, secret: str | None) -> None:
        self.star = star
        self.secret = secret
        self.complete = threading.Event()
        self._strangers: dict[int, UnixLink] = {}

    def open_door(self, path: str) -> None:
        """Let in those who knock at ``path``."""
        door = Door(path)
        self.star.closers += [door.close, self._close_strangers]
        self.star.abandoners += [door.abandon, self._close_strangers]
        self.star.loop.watch(door.sock.fileno(), select.EPOLLIN, lambda _events: self._accept(door))

    def _accept(self, door: Door) -> None:
        try:
            sock, _ = door.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            return
        nonce = secrets.token_hex(16)
        link = self.star.stranger_link(sock)
        self._strangers[link.fd] = link
        self.star.loop.watch(link.fd, select.EPOLLIN, lambda _events: self._on_stranger(link, nonce, pid))
        link.send(encode(Kind.CHALLENGE, body=nonce.encode()))

    def _on_stranger(self, link: UnixLink, nonce: str, pid: int) -> None:
        try:
            frames = link.receive()
            if not frames and not link.eof:
                return
            if link.eof or frames[0].kind != Kind.HELLO or len(frames[0].segments) != 1:
                raise BadFrame("no hello")
            hello = Hello.decode(frames[0].segments[0])
        except BadFrame:
            self._turn_away(link)
            return
        refusal = self.refusal(hello, prove(self.secret, nonce, hello.rank))
        if refusal is not None:
            link.send(encode(Kind.REFUSED, body=json.dumps(refusal).encode()))
            self._turn_away(link)
            return
        self._let_in(link, hello, pid)

    def refusal(self, hello: Hello, proof: str | None) -> tuple[bool, str] | None:
        """Why this worker is not let in, and whether it may come again; None: it is."""
        size = self.star.size
        if proof is not None and not secrets.compare_digest(hello.proof, proof):
            return False, "its DET_CORE_SECRET is not the chief's"
        if hello.protocol != PROTOCOL:
            return False, f"it speaks protocol {hello.protocol}, the chief {PROTOCOL}: install one det_core everywhere"
        if hello.size != size:
            return False, f"it was started with size={hello.size}, the chief with size={size}"
        if not 0 < hello.rank < size:
            return False, f"rank {hello.rank} is out of range: the job has the ranks 0 to {size - 1}"
        known = self.star.peers.get(hello.rank)
        if known is not None and known.gone:
            return True, "the previous job with this key is just ending"
        if known is not None:
            return False, f"rank {hello.rank} is already there: pid {known.pid} on {known.host}"
        return None

    def _let_in(self, link: UnixLink, hello: Hello, pid: int) -> None:
        star = self.star
        self._forget(link)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        control = star.control_link(link.sock)
        peer = Peer(hello.rank, hello.host, pid or hello.pid, control, bound=star.bound)
        peer.data = star.data_link(mine, hello.rank)
        with theirs:
            body = json.dumps([socket.gethostname(), os.getpid()]).encode()
            socket.send_fds(link.sock, [encode(Kind.WELCOME, body=body)], [theirs.fileno()])
        star.admit(peer, control)
        self.count()

    def count(self) -> None:
        """Tell everybody when the last one has come."""
        if len(self.star.peers) == self.star.size - 1:
            for peer in self.star.others():
                peer.tell(encode(Kind.READY))
            self.complete.set()

    def _turn_away(self, link: UnixLink) -> None:
        self._forget(link)
        link.close()

    def _forget(self, link: UnixLink) -> None:
        if self._strangers.pop(link.fd, None) is not None:
            self.star.loop.unwatch(link.fd)

    def _close_strangers(self) -> None:
        for link in self._strangers.values():
            link.close()
        self._strangers.clear()

    def missing(self) -> str:
        """The ranks that have not come yet."""
        there = self.star.peers
        return "waiting for rank " + ", ".join(str(r) for r in range(1, self.star.size) if r not in there)


def lead(star: Star, path: str | None, secret: str | None) -> None:
    """The chief's rendezvous: returns when every rank is there."""
    assembly = Assembly(star, secret)
    if path is not None:
        assembly.open_door(path)
    _await(star, assembly.complete, assembly.missing)


def _await(star: Star, event: threading.Event, whom: Callable[[], str]) -> None:
    patience = Patience(star.timeout, lambda: f"rank {star.rank} in the rendezvous, {whom()}")
    while not event.wait(patience.next(0.2)):
        star.raise_if_broken()
        if patience.expired:
            raise CollectiveTimeout(f"the rendezvous took longer than {patience.waited:.1f} s: {whom()}")


def join(star: Star, path: str, secret: str | None) -> None:
    """A worker's rendezvous over the unix socket: returns when every rank is there."""
    patience = Patience(star.timeout, lambda: f"rank {star.rank} waits for the chief, rank 0, to open {path}.sock")

    def hello(nonce: str) -> Hello:
        return Hello(star.rank, star.size, socket.gethostname(), os.getpid(), proof=prove(secret, nonce, star.rank))

    pause = 0.002
    while True:
        try:
            answer = knock(path, hello)
        except Refused as e:
            if not e.again:
                raise RendezvousError(f"the chief does not let rank {star.rank} in: {e}") from None
            answer = None
        if answer is not None:
            break
        if patience.expired:
            raise CollectiveTimeout(f"no chief at {path}.sock after {patience.waited:.1f} s")
        threading.Event().wait(patience.next(pause))
        pause = min(0.05, pause * 1.5)
    sock, welcome, data, (pid, _uid) = answer
    host, told = json.loads(bytes(welcome.segments[0]))
    control = star.control_link(sock)
    peer = Peer(0, host, pid or told, control, bound=star.bound)
    peer.data = star.data_link(data, 0)
    ready = threading.Event()
    star.on_ready(ready.set)
    star.call_soon(lambda: star.admit(peer, control))
    _await(star, ready, lambda: "the chief waits for other ranks")


@dataclass
class Links:
    """The stars of one rank: the one of the whole job, and the one of its machine where that is another."""

    everyone: Star
    local: Star | None = None

    def lane(self, name: str) -> Lane:
        """Collectives of all ranks."""
        return self.everyone.lane(name)

    def local_lane(self, name: str) -> Lane:
        """Collectives of the ranks of this machine; on one machine, a lane of its own in the one star."""
        return self.everyone.lane(f"local {name}") if self.local is None else self.local.lane(name)

    def close(self, *, farewell: Mapping[str, Any] | None, failure: BaseException | None) -> None:
        """Close the star of the machine, then that of the job."""
        try:
            if self.local is not None:
                self.local.close(failure=failure)
        finally:
            self.everyone.close(farewell=farewell, failure=failure)


def connect(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
    chief_ip: str | None,
    port: int,
    job: tuple[str, ...] = (),
    secret: str | None = None,
    insecure: bool = False,
    force_tcp: bool = False,
    timeout: float | None = None,
    bound: int = QUEUE_BOUND,
) -> Links:
    """The rendezvous: returns once every rank of the job is connected."""
    key = (*job, f"port={port}", f"chief={chief_ip if local_size != size else ''}", f"secret={secret or ''}")
    star = Star(rank=rank, size=size, timeout=timeout, bound=bound)
    try:
        if rank == 0:
            lead(star, rendezvous_path(key), secret)
        else:
            join(star, rendezvous_path(key), secret)
    except BaseException as e:
        star.close(failure=e)
        raise
    return Links(star)
