"""Links between the launchers of one job, so that a failure on one node ends the job on all of them.

Node 0 listens, the others connect to it. Both sides prove by HMAC that they have the job's secret, and then send one
JSON object per line, each behind a MAC over its direction and number. A link is authentic, not secret: it carries
names, process IDs and statuses.

============  =====================================================================================
``hello``     to node 0: number of the sender's node, its det_core, and the size of the job that it expects
``beat``      heartbeat, each second; a node counts as lost after :data:`MAX_MISSED_HEARTBEATS` without a message
``failed``    a rank has failed, or a node was lost: the others are to end. Node 0 forwards it
``bye``       this launcher leaves in order
============  =====================================================================================

A launcher does not leave before it has linked, node 0's not before all others have: a failure in the meantime would
reach nobody. A node that has not linked by the deadline has failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from typing import Any

import det_core

from ._hosts import Layout
from ._outcome import RankOutcome, counted

# Counted in heartbeats sent, not in seconds: a launcher that was itself suspended would else find all others lost.
MAX_MISSED_HEARTBEATS = 8
"""Heartbeats sent without receiving a message, after which a node counts as lost."""
_HEARTBEAT_INTERVAL = 1.0
_HANDSHAKE_TIMEOUT = 10.0
"""Maximum wait in seconds for each step of a connection: connect, authenticate, hello."""
_RETRY_DELAY = 0.3
_NOTICE_DELAY = 10.0
"""Seconds after which the nodes that have not linked are named."""
_LEAVE_TIMEOUT = 2.0
"""Maximum wait in seconds for the thread to send its goodbyes; a node that does not read may not delay the end."""
LINK_TIMEOUT = 600.0
"""Default of ``--link-timeout``: maximum wait in seconds until all launchers of a job have linked."""
_CONNECTION_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError)
"""Errors of a connection that ends, or whose other side is not a launcher."""


class AuthenticationFailed(ValueError):
    """The other side has another secret."""


class Link:
    """Connections of this node's launcher to those of the other nodes.

    A thread runs them. It never waits for the caller, nor the caller for it, except in :meth:`leave`.

    Args:
        layout: nodes of the job, and the number of this one.
        port: port of node 0's launcher.
        secret: secret of the job.
        timeout: maximum wait in seconds until all nodes have linked.

    Attributes:
        node: number of this node.
        fd: file descriptor that becomes readable when :meth:`receive` has news or ``others`` has changed.
        others: nodes that are linked with this one, by number.
        pending: nodes that have to link with this one and have not: node 0; on node 0 all others. They receive earlier
            failures when they link.
    """

    def __init__(self, layout: Layout, port: int, secret: str, timeout: float = LINK_TIMEOUT) -> None:
        self.node = layout.node_rank
        self.fd, self._wake = os.pipe()
        self.pending = {0}
        if self.node == 0:
            self.pending = set(range(1, len(layout.hosts)))
        self.others: dict[int, _Peer] = {}
        self._layout = layout
        self._port = port
        self._secret = secret.encode()
        self._timeout = timeout
        self._handshakes = 0  # accepted connections whose other side has not sent its hello yet
        self._rejected: set[str] = set()  # addresses of launchers with another secret
        self._accepted: set[asyncio.Task[None]] = set()
        self._news: queue.SimpleQueue[RankOutcome | str] = queue.SimpleQueue()
        self._failures: dict[tuple[int, int | None], RankOutcome] = {}  # of all nodes, by node and rank
        self._left = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Start to listen, or to connect to node 0."""
        self._thread.start()

    def receive(self) -> list[RankOutcome | str]:
        """Return the news since the last call: failed ranks of other nodes, lost nodes, and notices."""
        os.read(self.fd, 4096)
        return [self._news.get() for _ in range(self._news.qsize())]

    def send_failure(self, rank: RankOutcome) -> None:
        """Notify the other launchers that a rank of this node has failed."""
        self._loop.call_soon_threadsafe(self._on_failure, rank, self.node)

    def failed(self) -> list[RankOutcome]:
        """Return the known failures of other nodes' ranks, and of nodes."""
        return [rank for rank in list(self._failures.values()) if rank.rank is None or rank.node != self.node]

    def knows_failure_of(self, rank: int) -> bool:
        """Return whether a rank of another node, or its whole node, is known to have failed."""
        node = self._layout.node_of(rank)
        return (node, rank) in self._failures or (node, None) in self._failures

    def leave(self) -> None:
        """Send goodbyes and end the thread."""
        self._loop.call_soon_threadsafe(self._left.set)
        self._thread.join(_LEAVE_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()

    # Everything below runs in the thread.

    def _run(self) -> None:
        # By default asyncio only logs the error of a callback, and failures would no longer reach the other nodes.
        self._loop.set_exception_handler(self._on_loop_error)
        self._loop.run_until_complete(self._work())

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        cause = context.get("exception") or context["message"]
        self._notify(f"link to other nodes failed: {cause}")

    def _notify(self, *news: RankOutcome | str) -> None:
        for item in news:
            self._news.put(item)
        os.write(self._wake, b".")

    async def _work(self) -> None:
        link = asyncio.create_task(self._serve() if self.node == 0 else self._connect())
        deadline = asyncio.create_task(self._watch_pending())
        leaving = asyncio.create_task(self._left.wait())
        await asyncio.wait({link, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if link.done():
            deadline.cancel()
            try:
                link.result()
            except AuthenticationFailed as e:
                self._give_up(0, str(e))
            except OSError as e:
                self._give_up(self.node, f"cannot link with the others: {e}")
        await leaving
        # A launcher that has just proved itself would take an aborted handshake for the loss of this node.
        for _ in range(20):
            if self._handshakes:
                await asyncio.sleep(0.05)
        for peer in self.others.values():
            peer.send("bye")
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next round of the loop

    async def _watch_pending(self) -> None:
        """Name the nodes that have not linked after a while, and end the job if they have not by the deadline."""
        await asyncio.sleep(min(_NOTICE_DELAY, self._timeout))
        chief = f"{self._layout.chief}:{self._port}"
        failure = "did not link"
        notice = f"not linked yet: {', '.join(map(self._node_name, sorted(self.pending)))}; they connect to {chief}"
        if self.node:
            failure = f"did not answer at {chief}"
            notice = f"node 0's launcher does not answer at {chief}"
        if self.pending:
            self._notify(f"{notice}; the job ends if that is so after {self._timeout:g} s (--link-timeout)")
        await asyncio.sleep(max(0.0, self._timeout - _NOTICE_DELAY))
        for node in sorted(self.pending):
            self._give_up(node, f"{failure} within {self._timeout:g} s")

    def _node_name(self, node: int) -> str:
        if self._layout.hosts_are_addresses or node == 0:
            return f"node {node} ({self._layout.hosts[node].name})"
        return f"node {node}"

    def _give_up(self, node: int, cause: str) -> None:
        """Stop waiting for any node, and report the failure of one."""
        self.pending.clear()
        host = self._layout.hosts[node].name
        if node == self.node:
            host = socket.gethostname()
        self._on_node_failure(node, host, cause)

    def _on_node_failure(self, node: int, host: str, cause: str, source: int | None = None) -> None:
        self._on_failure(RankOutcome(None, status=1, description=cause, host=host, node=node), source)

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._on_connection, None, self._port)
        except OSError as e:
            message = f"port {self._port} cannot be used ({e.strerror}); pass another --launcher-port on every node"
            raise OSError(message) from e
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Before Python 3.12 asyncio's own task for a connection prints an error when it is cancelled.
        task = asyncio.ensure_future(self._accept(reader, writer))
        self._accepted.add(task)
        task.add_done_callback(self._accepted.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(reader, writer, server=True)
        self._handshakes += 1
        try:
            await asyncio.wait_for(peer.authenticate(self._secret), _HANDSHAKE_TIMEOUT)
            hello = await asyncio.wait_for(peer.read(), _HANDSHAKE_TIMEOUT)
            node = int(hello["node"])
            host = str(hello["host"])
            size = int(hello["size"])
        except AuthenticationFailed:
            self._on_rejected(str(writer.get_extra_info("peername")[0]))
            writer.close()
            return
        except (*_CONNECTION_ERRORS, asyncio.TimeoutError):
            writer.close()
            return
        finally:
            self._handshakes -= 1
        if node in self.others:
            return self._reject_duplicate(peer, node, host)
        version = hello.get("version")
        if version != det_core.__version__:
            cause = f"has det_core {version}, and node 0 {det_core.__version__}: install the same on each"
            self._on_node_failure(node, host, cause)
        elif size != self._layout.size:  # without --nproc-per-node each takes the others to have as many GPUs as itself
            cause = f"expects {size} ranks, this one {self._layout.size}: pass --nproc-per-node on every node"
            self._on_node_failure(node, host, cause)
        await self._listen(peer, node, host)

    def _reject_duplicate(self, peer: _Peer, node: int, host: str) -> None:
        cause = (
            f"cannot join, as another launcher is node {node}: pass the same hosts in the same order on every node, or "
            "give each its own --node-rank"
        )
        duplicate = RankOutcome(None, status=1, description=cause, host=host, node=node)
        self._notify(f"{duplicate.name} {cause}")
        peer.send("failed", **duplicate.to_message())
        peer.send("bye")
        peer.close()

    async def _connect(self) -> None:
        chief = self._layout.chief
        while True:
            try:
                peer = _Peer(*await asyncio.wait_for(asyncio.open_connection(chief, self._port), _HANDSHAKE_TIMEOUT))
                await asyncio.wait_for(peer.authenticate(self._secret), _HANDSHAKE_TIMEOUT)
            except AuthenticationFailed:
                raise
            except (*_CONNECTION_ERRORS, asyncio.TimeoutError):
                await asyncio.sleep(_RETRY_DELAY)
            else:
                fields = {"host": socket.gethostname(), "size": self._layout.size, "version": det_core.__version__}
                peer.send("hello", node=self.node, **fields)
                return await self._listen(peer, 0, chief)

    def _on_rejected(self, address: str) -> None:
        if address not in self._rejected:  # one notice, however often it tries again
            self._rejected.add(address)
            self._notify(f"a launcher at {address} has another DET_CORE_SECRET: set the same on each node")

    async def _listen(self, peer: _Peer, node: int, host: str) -> None:
        """Receive a node's messages until it leaves or is lost."""
        self.others[node] = peer
        is_last = self.pending == {node}
        self.pending.discard(node)
        if is_last and self.node == 0:
            count = len(self._layout.hosts) - 1
            self._notify(f"linked with {counted(count, 'other node')}")
        else:
            self._notify()
        for rank in self._failures.values():  # those from before it linked
            peer.send("failed", **rank.to_message())
        heartbeats = asyncio.create_task(self._send_heartbeats(peer))
        try:
            while (message := await peer.read()).pop("kind") != "bye":
                peer.missed = 0
                if message:
                    self._on_failure(RankOutcome.from_message(message), node)
        except _CONNECTION_ERRORS:
            if not self._left.is_set():
                self._on_node_failure(node, host, "was lost: its launcher has died or does not answer", node)
        finally:
            del self.others[node]
            heartbeats.cancel()
            peer.close()
            self._notify()

    async def _send_heartbeats(self, peer: _Peer) -> None:
        while peer.missed < MAX_MISSED_HEARTBEATS:
            peer.send("beat")
            peer.missed += 1
            await asyncio.sleep(_HEARTBEAT_INTERVAL)
        peer.abort()

    def _on_failure(self, rank: RankOutcome, source: int | None) -> None:
        """Record a failure; pass it to the caller and to the nodes that may not know it.

        Args:
            rank: the failure.
            source: node that it was received from, None if this launcher has found it.
        """
        if (rank.node, rank.rank) in self._failures:
            return
        self._failures[rank.node, rank.rank] = rank
        if source != self.node:
            rank.ended = time.monotonic()
            self._notify(rank)
        for other, peer in self.others.items():
            if other != source:
                peer.send("failed", **rank.to_message())


class _Peer:
    """Connection to another launcher."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, server: bool = False) -> None:
        self.missed = 0  # heartbeats since the last message
        self._reader = reader
        self._writer = writer
        self._server = server
        self._key = b""
        self._sent = 0
        self._received = 0

    async def authenticate(self, secret: bytes) -> None:
        """Prove the secret to each other, and derive a key for this connection alone.

        Raises:
            AuthenticationFailed: If the other side has another secret.
        """
        own_nonce = secrets.token_bytes(32)
        self._writer.write(own_nonce)
        peer_nonce = await self._reader.readexactly(32)
        nonces = peer_nonce + own_nonce
        if self._server:
            nonces = own_nonce + peer_nonce
        client, server, self._key = (
            hmac.digest(secret, b"det_core launchers: %s" % use + nonces, hashlib.sha256)
            for use in (b"client", b"server", b"messages")
        )
        if not self._server:
            self._writer.write(client)
        expected = client if self._server else server
        is_proved = hmac.compare_digest(await self._reader.readexactly(32), expected)
        if self._server:  # the side that is connected to proves itself second, so that strangers cannot collect proofs
            self._writer.write(server if is_proved else bytes(32))
        if not is_proved:
            raise AuthenticationFailed("has another DET_CORE_SECRET: set the same on each node")

    def send(self, kind: str, **content: object) -> None:
        """Queue a message. If it cannot be sent, :meth:`read` raises."""
        line = json.dumps({"kind": kind, **content}).encode()
        self._sent += 1
        self._writer.write(self._mac(self._sent, line, server=self._server) + b" " + line + b"\n")

    async def read(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError, EOFError, ValueError: If the connection has ended, or the message is not the other launcher's.
        """
        mac, _, line = (await self._reader.readuntil(b"\n"))[:-1].partition(b" ")
        self._received += 1
        if not hmac.compare_digest(mac, self._mac(self._received, line, server=not self._server)):
            raise ValueError("message of another sender than the launcher")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now; :meth:`read` raises."""
        self._writer.transport.abort()

    def _mac(self, number: int, line: bytes, *, server: bool) -> bytes:
        return hmac.new(self._key, b"%d %d " % (server, number) + line, hashlib.sha256).hexdigest().encode()
