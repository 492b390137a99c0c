"""Links between the launchers of one job, so that a failure on one machine ends the job on all of them.

Machine 0 listens, the others connect to it. Both sides prove by HMAC that they have the job's secret, and then say one
JSON object a line, each behind a MAC over its direction and number. A link is authentic, not secret: it carries names,
process ids and statuses.

============  =====================================================================================
``hello``     to machine 0: which machine this is, its det_core, and how many ranks it takes the job to have
``beat``      each second; after :data:`MAX_MISSED_HEARTBEATS` of them in vain a machine counts as lost
``failed``    a rank has failed, or a machine was lost: the others are to end. Machine 0 hands it on
``bye``       this launcher leaves, and that is no failure
============  =====================================================================================

A launcher does not leave before it has linked, machine 0's not before all others have: what has failed meanwhile, or
could not be started, would never be heard of. A machine that has not linked by the deadline has failed.
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
from ._outcome import RankOutcome

MAX_MISSED_HEARTBEATS = 8
"""Beats that are said without hearing one. Beats, not seconds: a launcher that was itself stopped for a while would
else take all others for dead."""
_HEARTBEAT_INTERVAL = 1.0
"""Seconds between two beats."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds that the other side has to connect and to prove itself."""
_NOTICE_DELAY = 10.0
"""Seconds after which it is said which machines have not linked."""
LINK_TIMEOUT = 600.0
"""Seconds in which all launchers of a job have to link, if ``--link-timeout`` does not say otherwise."""
_BROKEN = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError)
"""How a connection ends, or turns out not to be a launcher's."""


class AuthenticationFailed(ValueError):
    """The other side has another secret."""


class Link:
    """This machine's launcher among those of the other machines.

    A thread does the talking: it never waits for the caller, nor the caller for it, but for :meth:`leave`.

    Args:
        layout: all machines of the job, and which of them this is.
        port: where the first machine's launcher listens.
        secret: the job's.
        timeout: seconds in which all machines have to link.

    Attributes:
        node: the number of this machine.
        fd: a file descriptor that is readable when there is something to :meth:`receive`, or ``others`` has changed.
        others: the machines that are linked with this one, by number.
        pending: the machines that this one has not linked with yet and has to: machine 0, on that one all others.
            What fails meanwhile is told to them when they have.
    """

    def __init__(self, layout: Layout, port: int, secret: str, timeout: float = LINK_TIMEOUT) -> None:
        self.node = layout.node_rank
        self._layout = layout
        self._port = port
        self._secret = secret.encode()
        self._timeout = timeout
        self.fd, self._wake = os.pipe()
        self.pending = {0} if self.node else set(range(1, len(layout.hosts)))
        self.others: dict[int, _Peer] = {}
        self._greetings = 0  # connections whose other side has not said yet which machine it is
        self._refused: set[str] = set()  # addresses of launchers with another secret
        self._accepted: set[asyncio.Task[None]] = set()
        self._heard: queue.SimpleQueue[RankOutcome | str] = queue.SimpleQueue()
        self._failures: dict[tuple[int, int | None], RankOutcome] = {}  # of all machines, by machine and rank
        self._left = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Begin to listen, or to look for machine 0."""
        self._thread.start()

    def receive(self) -> list[RankOutcome | str]:
        """What is new: ranks that have failed elsewhere, machines that were lost, and notices."""
        os.read(self.fd, 4096)
        return [self._heard.get() for _ in range(self._heard.qsize())]

    def send_failure(self, rank: RankOutcome) -> None:
        """Tell the others that a rank of this machine has failed."""
        self._loop.call_soon_threadsafe(self._on_failure, rank, self.node)

    def failed(self) -> list[RankOutcome]:
        """All ranks elsewhere, and machines, that are known to have failed."""
        return [rank for rank in list(self._failures.values()) if rank.rank is None or rank.node != self.node]

    def knows_failure_of(self, rank: int) -> bool:
        """Return whether a rank of another machine, or its whole machine, is known to have failed."""
        node = self._layout.node_of(rank)
        return (node, rank) in self._failures or (node, None) in self._failures

    def leave(self) -> None:
        """Say goodbye, and end the thread."""
        self._loop.call_soon_threadsafe(self._left.set)
        self._thread.join(2)  # so long at most: a machine that does not read is no reason to stay
        if not self._thread.is_alive():
            self._loop.close()

    # all below runs in the thread

    def _run(self) -> None:
        # asyncio only logs what a callback raises, and a failure would not be told to the others, in silence.
        self._loop.set_exception_handler(
            lambda _, what: self._say(f"the link to other machines failed: {what.get('exception') or what['message']}")
        )
        self._loop.run_until_complete(self._work())

    def _say(self, *what: RankOutcome | str) -> None:
        for each in what:
            self._heard.put(each)
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
        for _ in range(20):  # one that has just come has proved itself, and would take it for lost
            if self._greetings:
                await asyncio.sleep(0.05)
        for peer in self.others.values():
            peer.say("bye")
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # in which connections are closed

    async def _watch_pending(self) -> None:
        """Name the machines that have not linked after a while, and end the job if they have not by the deadline."""
        await asyncio.sleep(min(_NOTICE_DELAY, self._timeout))
        chief = f"{self._layout.chief}:{self._port}"
        if self.pending:
            limit = f"the job ends if that is so after {self._timeout:g} s (--link-timeout)"
            if self.node:
                self._say(f"machine 0's launcher does not answer at {chief}: {limit}")
            else:
                names = ", ".join(map(self._name, sorted(self.pending)))
                self._say(f"not linked yet: {names}; their launchers look for this one at {chief}, and {limit}")
        await asyncio.sleep(max(0.0, self._timeout - _NOTICE_DELAY))
        where = f"answer at {chief}" if self.node else "link"
        for node in sorted(self.pending):
            self._give_up(node, f"did not {where} within {self._timeout:g} s")

    def _name(self, node: int) -> str:
        known = self._layout.hosts_are_addresses or node == 0
        return f"machine {node} ({self._layout.hosts[node].name})" if known else f"machine {node}"

    def _give_up(self, node: int, cause: str) -> None:
        """Wait for no machine any more, and let the job end for one of them."""
        self.pending.clear()
        host = socket.gethostname() if node == self.node else self._layout.hosts[node].name
        self._on_failure(RankOutcome(None, status=1, description=cause, host=host, node=node), None)

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._on_connection, None, self._port)
        except OSError as e:
            why = f"port {self._port} cannot be used ({e.strerror}); --launcher-port PORT takes another one everywhere"
            raise OSError(why) from e
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio's would, before Python 3.12, take being cancelled for an error, and print it.
        task = asyncio.ensure_future(self._accept(reader, writer))
        self._accepted.add(task)
        task.add_done_callback(self._accepted.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(reader, writer, server=True)
        self._greetings += 1
        try:
            await asyncio.wait_for(peer.authenticate(self._secret), _HANDSHAKE_TIMEOUT)
            hello = await asyncio.wait_for(peer.read(), _HANDSHAKE_TIMEOUT)
            node, host, size = int(hello["node"]), str(hello["host"]), int(hello["size"])
        except AuthenticationFailed:
            self._on_refused(str(writer.get_extra_info("peername")[0]))
            writer.close()
            return
        except (*_BROKEN, asyncio.TimeoutError):
            writer.close()
            return
        finally:
            self._greetings -= 1
        if node in self.others:
            words = f"cannot join, as another launcher is machine {node}: name the same hosts in the same order on all "
            words += "machines, or give each its own --node-rank"
            twin = RankOutcome(None, status=1, description=words, host=host, node=node)
            self._say(f"{twin.name} {words}")
            peer.say("failed", **twin.to_message())
            peer.say("bye")
            return peer.close()
        version = hello.get("version")
        if version != det_core.__version__:
            words = f"has det_core {version}, and machine 0 {det_core.__version__}: install the same on each"
            self._on_failure(RankOutcome(None, status=1, description=words, host=host, node=node), None)
        elif size != self._layout.size:  # each took the others to have as many GPUs as it has itself
            sizes = f"takes the job to have {size} ranks, and this one {self._layout.size}"
            words = f"{sizes}: say --nproc-per-node on all machines"
            self._on_failure(RankOutcome(None, status=1, description=words, host=host, node=node), None)
        await self._listen(peer, node, host)

    async def _connect(self) -> None:
        chief = self._layout.chief
        while True:
            try:
                peer = _Peer(*await asyncio.wait_for(asyncio.open_connection(chief, self._port), _HANDSHAKE_TIMEOUT))
                await asyncio.wait_for(peer.authenticate(self._secret), _HANDSHAKE_TIMEOUT)
            except AuthenticationFailed:
                raise
            except (*_BROKEN, asyncio.TimeoutError):
                await asyncio.sleep(0.3)
            else:
                facts = {"host": socket.gethostname(), "size": self._layout.size, "version": det_core.__version__}
                peer.say("hello", node=self.node, **facts)
                return await self._listen(peer, 0, chief)

    def _on_refused(self, address: str) -> None:
        if address not in self._refused:  # once, as it may try again
            self._refused.add(address)
            self._say(f"a launcher at {address} has another DET_CORE_SECRET: set the same on each machine")

    async def _listen(self, peer: _Peer, node: int, host: str) -> None:
        """Hear a machine until it leaves or is lost."""
        self.others[node] = peer
        is_last = self.pending == {node}
        self.pending.discard(node)
        if is_last and self.node == 0:
            count = len(self._layout.hosts) - 1
            self._say(f"linked with {count} other machine{'' if count == 1 else 's'}")
        else:
            self._say()
        for rank in self._failures.values():  # what it has missed
            peer.say("failed", **rank.to_message())
        beats = asyncio.create_task(self._beat(peer))
        try:
            while (message := await peer.read()).pop("kind") != "bye":
                peer.missed = 0
                if message:
                    self._on_failure(RankOutcome.from_message(message), node)
        except _BROKEN:
            if not self._left.is_set():
                words = "was lost: its launcher has died or does not answer"
                self._on_failure(RankOutcome(None, status=1, description=words, host=host, node=node), node)
        finally:
            del self.others[node]
            beats.cancel()
            peer.close()
            self._say()

    async def _beat(self, peer: _Peer) -> None:
        while peer.missed < MAX_MISSED_HEARTBEATS:
            peer.say("beat")
            peer.missed += 1
            await asyncio.sleep(_HEARTBEAT_INTERVAL)
        peer.abort()

    def _on_failure(self, rank: RankOutcome, source: int | None) -> None:
        """Remember a failure, and tell those who may not know of it: the caller, and machines it does not come from."""
        if (rank.node, rank.rank) in self._failures:
            return
        self._failures[rank.node, rank.rank] = rank
        if source != self.node:
            rank.ended = time.monotonic()
            self._say(rank)
        for other, peer in self.others.items():
            if other != source:
                peer.say("failed", **rank.to_message())


class _Peer:
    """A launcher at the other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, server: bool = False) -> None:
        self._reader, self._writer, self._server = reader, writer, server
        self._key, self._said, self._read = b"", 0, 0
        self.missed = 0

    async def authenticate(self, secret: bytes) -> None:
        """Prove the secret to each other, and agree on a key for this connection alone.

        Raises:
            AuthenticationFailed: the other side has another secret.
        """
        mine = secrets.token_bytes(32)
        self._writer.write(mine)
        theirs = await self._reader.readexactly(32)
        nonces = mine + theirs if self._server else theirs + mine
        client, server, self._key = (
            hmac.digest(secret, b"det_core launchers: %s" % use + nonces, hashlib.sha256)
            for use in (b"client", b"server", b"messages")
        )
        if not self._server:
            self._writer.write(client)
        proved = hmac.compare_digest(await self._reader.readexactly(32), client if self._server else server)
        if self._server:  # which proves itself to nobody who has not done so first
            self._writer.write(server if proved else bytes(32))
        if not proved:
            raise AuthenticationFailed("has another DET_CORE_SECRET: set the same on each machine")

    def say(self, kind: str, **content: object) -> None:
        """Queue a message. Where it cannot be sent, reading fails."""
        line = json.dumps({"kind": kind, **content}).encode()
        self._said += 1
        self._writer.write(self._mac(self._said, line, server=self._server) + b" " + line + b"\n")

    async def read(self) -> dict[str, Any]:
        """The next message.

        Raises:
            OSError, EOFError, ValueError: the connection has ended, or the message is not the other side's.
        """
        mac, _, line = (await self._reader.readuntil(b"\n"))[:-1].partition(b" ")
        self._read += 1
        if not hmac.compare_digest(mac, self._mac(self._read, line, server=not self._server)):
            raise ValueError("a message that is not the other launcher's")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close it now; reading fails."""
        self._writer.transport.abort()

    def _mac(self, number: int, line: bytes, *, server: bool) -> bytes:
        return hmac.new(self._key, b"%d %d " % (server, number) + line, hashlib.sha256).hexdigest().encode()
