"""A peer: another rank, the links to it, and whether it is still there."""

from __future__ import annotations

import contextlib
import os
import threading

from det_core.ipc._frames import Frame, Kind, encode
from det_core.ipc._serialization import Packet
from det_core.ipc._unix_link import UnixLink, peer_credentials
from det_core.ipc._zmq_link import ZmqLink

MAX_IN_FLIGHT_BYTES = 256 << 20
"""Default maximum of bytes in flight to one peer; a sender waits beyond it."""
_CREDIT_BYTES = 1 << 20
"""Consumed bytes that are credited together: one CREDIT frame for each small call would double the messages."""


class Peer:
    """Rank at the other end of a connection.

    Args:
        rank: its number in the communicator.
        job_rank: its number in the job, which differs in the communicator of one node.
        host: name of its host.
        pid: its process ID.
        control: link for all messages except those of ``data``.
        data: separate link of the user channel, or None between nodes.
        max_in_flight: maximum of bytes in flight to it; a sender waits beyond.
    """

    def __init__(
        self,
        rank: int,
        job_rank: int,
        host: str,
        pid: int,
        control: UnixLink | ZmqLink,
        data: UnixLink | None,
        *,
        max_in_flight: int,
    ) -> None:
        self.rank = rank
        self.job_rank = job_rank
        self.host = host
        self.pid = pid
        self.control = control
        self.data = data
        self.pidfd: int | None = None
        self.departed = False
        """Whether it has said goodbye."""
        self.dead = False
        self.exiting = False
        """Whether its process has announced that it exits without closing."""
        self.failure: str | None = None
        self.in_flight = 0
        """Bytes sent to it and not yet credited."""
        self._unacknowledged = 0
        self._uncredited = 0
        self._max_in_flight = max_in_flight
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"rank {self.job_rank} (host {self.host}, pid {self.pid})"

    @property
    def is_gone(self) -> bool:
        """Whether the peer has departed or died."""
        return self.departed or self.dead

    @property
    def queued(self) -> int:
        """Amount in the queues of both links; above 0 until the kernel or ZMQ has it all."""
        if self.data is None:
            return self.control.queued
        return self.control.queued + self.data.queued

    # acknowledged messages

    def send_with_ack(self, data: bytes) -> None:
        """Send a small control frame that the peer acknowledges on arrival; see ``notified``."""
        with self._lock:
            self._unacknowledged += 1
        self.control.send(data)

    def acknowledge(self, own_rank: int) -> None:
        """Acknowledge a frame of the peer, if it waits for that."""
        if not isinstance(self.control, UnixLink):
            self.control.send(encode(Kind.ACK, rank=own_rank))

    def on_ack(self) -> None:
        """Record an acknowledgement of the peer."""
        with self._lock:
            self._unacknowledged -= 1

    @property
    def notified(self) -> bool:
        """Whether all acknowledged messages will reach the peer even if this process ends now."""
        # A unix socket delivers what the kernel has, also after the sender's death. The queues of ZMQ end with the
        # process, and a TCP reset can discard data that has arrived and is unread.
        if isinstance(self.control, UnixLink):
            return not self.queued
        return self._unacknowledged <= 0

    # calls, and their bytes in flight

    def has_credit(self, size: int) -> bool:
        """Return whether ``size`` bytes may be sent without waiting."""
        # A single message may always go, or one larger than the maximum would wait forever.
        return not self.in_flight or self.in_flight + size <= self._max_in_flight

    def send_small(self, data: bytes) -> bool:
        """Send a small call's frame over the data link; return False if there is none, or no credit."""
        if self.data is None or not self.has_credit(len(data)):
            return False
        if queued := self.data.send(data):
            self._add_in_flight(queued)
        return True

    def send_call(self, packet: Packet, *, direct: bool) -> None:
        """Send a call's frame, over the data link if ``direct`` and there is one."""
        if direct and self.data is not None:
            packet.local()
            self._add_in_flight(packet.file_bytes)
            self._add_in_flight(self.data.send(packet))
        else:
            self._add_in_flight(packet.size)
            self.control.send(packet)

    def flush_data(self) -> None:
        """Flush the queue of the data link."""
        if self.data is not None:
            self.on_credit(self.data.flush())

    def on_credit(self, size: int) -> None:
        """Record that ``size`` bytes are no longer in flight."""
        self._add_in_flight(-size)

    def _add_in_flight(self, size: int) -> None:
        with self._lock:
            self.in_flight += size

    def return_credit(self, frame: Frame, own_rank: int) -> None:
        """Return send credit for a consumed frame of the peer, many small frames together."""
        with self._lock:
            self._uncredited += frame.credit
            if self._uncredited < min(_CREDIT_BYTES, self._max_in_flight // 4):
                return
            credit = self._uncredited
            self._uncredited = 0
        self.control.send(encode(Kind.CREDIT, rank=own_rank, number=credit))

    # the end

    def watch_process(self) -> int | None:
        """Return a descriptor that is readable once the process is dead, or None if the kernel provides none."""
        # By the kernel's pid for the socket, not by the peer's own: in another PID namespace that is any process.
        if isinstance(self.control, UnixLink) and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(peer_credentials(self.control.sock)[0])
        return self.pidfd

    def kill(self) -> None:
        """Mark the peer dead, and discard everything to send to it."""
        self.dead = True
        self.control.kill()
        if self.data is not None:
            self.data.kill()

    def close(self) -> None:
        """Close the links."""
        self.control.close()
        if self.data is not None:
            self.data.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
