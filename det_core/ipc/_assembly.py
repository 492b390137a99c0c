"""The chief's side of the rendezvous: who is let in, over the unix socket and over the port."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading

from det_core.ipc._frames import BadFrame, Frame, Kind, encode
from det_core.ipc._link import UnixLink
from det_core.ipc._peer import Peer
from det_core.ipc._remote import Hub, RemoteLink
from det_core.ipc._rendezvous import (
    PROTOCOL,
    Door,
    Hello,
    peer_credentials,
    prove,
    wait_for,
    who_am_i,
)
from det_core.ipc._secrets import CurveKeys
from det_core.ipc._star import Star


class Assembly:
    """The chief's side: lets workers in until every rank is there, and turns others away.

    After the constructor and the ``open_`` methods, everything but ``wait`` runs on the ipc thread.
    """

    def __init__(self, star: Star, secret: str | None, job: str) -> None:
        self.star = star
        self.job = job
        self.secret = secret
        self.complete = threading.Event()
        self._strangers: dict[int, UnixLink] = {}
        self._routes: dict[bytes | None, Peer] = {}
        self._hub: Hub | None = None

    def open_door(self, path: str) -> None:
        """Let in those who knock at ``path``."""
        door = Door(path)
        self.star.closers += [door.close, self._close_strangers]
        self.star.abandoners += [door.abandon, self._close_strangers]
        self.star.loop.watch(door.sock.fileno(), select.EPOLLIN, lambda _events: self._accept(door))

    def open_port(self, interface: str, port: int, keys: CurveKeys | None) -> None:
        """Let in those who connect to ``port`` of this machine."""
        self._hub = Hub(
            self.star.loop,
            keys,
            on_frame=self._on_remote_frame,
            on_unreachable=self._on_unreachable,
            trusted=lambda route: route in self._routes,
        )
        self._hub.bind(interface, port)
        self.star.closers.append(self._hub.close)

    # workers of this machine

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
        link = self.star.control.stranger_link(sock)
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
        if hello.job != self.job:
            return False, "it belongs to another job: give this one another pub_port"
        if hello.size != size:
            return False, f"it was started with size={hello.size}, the chief with size={size}"
        if not 0 < hello.rank < size:
            return False, f"rank {hello.rank} is out of range: the job has the ranks 0 to {size - 1}"
        known = self.star.peers.get(hello.rank)
        if known is not None and (known.gone or self.star.closing):  # a hello may overtake the goodbye over TCP
            return True, "the previous job with this key is just ending"
        if known is not None:
            return False, f"rank {hello.rank} is already there: pid {known.pid} on {known.host}"
        return None

    def _let_in(self, link: UnixLink, hello: Hello, pid: int) -> None:
        star = self.star
        self._forget(link)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        control = star.control.control_link(link.sock)
        peer = Peer(hello.rank, hello.host, pid or hello.pid, control, bound=star.bound)
        peer.data = star.control.data_link(mine, hello.rank)
        with theirs:
            socket.send_fds(link.sock, [encode(Kind.WELCOME, body=who_am_i())], [theirs.fileno()])
        star.control.admit(peer, control)
        self.count()

    # workers of other machines

    def _on_remote_frame(self, route: bytes | None, frame: Frame) -> None:
        peer = self._routes.get(route)
        if peer is not None:
            # ZMQ sends what a connection has not taken over the next one, where the worker says hello anew
            if not peer.dead and frame.kind != Kind.HELLO:
                self.star.control.dispatch(peer, frame)
            return
        if frame.kind != Kind.HELLO or len(frame.segments) != 1:
            raise BadFrame("no hello")
        assert self._hub is not None
        hello = Hello.decode(frame.segments[0])
        link = self._hub.link(route)
        refusal = self.refusal(hello, None)
        if refusal is not None:
            link.send(encode(Kind.REFUSED, body=json.dumps(refusal).encode()))
            link.flush()
            self._hub.links.remove(link)
            return
        peer = self._routes[route] = Peer(hello.rank, hello.host, hello.pid, link, bound=self.star.bound)
        peer.remote = True
        link.send(encode(Kind.WELCOME, body=who_am_i()))
        self.star.control.admit(peer, None)
        self.count()

    def _on_unreachable(self, link: RemoteLink) -> None:
        assert self._hub is not None
        if link in self._hub.links:
            self._hub.links.remove(link)
        if link.route in self._routes:
            self.star.control.gone(self._routes[link.route])

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

    def wait(self) -> None:
        """Return when every rank is there."""
        wait_for(self.star, self.complete, self.missing)

    def missing(self) -> str:
        """The ranks that have not come yet."""
        ranks = [str(self.star.name(r)) for r in range(1, self.star.size) if r not in self.star.peers]
        return f"waiting for rank {', '.join(ranks)}"
