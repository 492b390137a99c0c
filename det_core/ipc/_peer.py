"""What one rank knows of another one that it is linked to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from det_core.ipc._frames import Frame, Kind, encode
from det_core.ipc._link import UnixLink
from det_core.ipc._payload import IN_FILE_FROM, Packet


class ControlLink(Protocol):
    """The part of a link that a peer needs, whatever carries it."""

    queued: int

    def send(self, packet: Packet | bytes) -> int:
        """Send or queue one frame; never blocks. The number of bytes queued."""

    def kill(self) -> None:
        """Send nothing any more."""

    def close(self) -> None:
        """Let go of it."""


class Room:
    """How many bytes are on their way to a peer, against the bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0
        self._lock = threading.Lock()

    def full(self, size: int) -> bool:
        """Whether ``size`` more bytes have to wait. One message may always go, however large."""
        return self.used > 0 and self.used + size > self.bound

    def add(self, size: int) -> None:
        """``size`` more bytes are on their way (fewer, when negative)."""
        with self._lock:
            self.used += size


class Peer:
    """Another rank: who it is, the links to it, and whether it is still there."""

    def __init__(self, rank: int, host: str, pid: int, control: ControlLink, *, bound: int) -> None:
        self.rank = rank
        self.name = rank
        """Its number in the job, which is another one in the star of a machine."""
        self.host = host
        self.pid = pid
        self.control = control
        self.data: UnixLink | None = None
        """The user lane's own socket; None between machines."""
        self.pidfd: int | None = None
        self.room = Room(bound)
        self.departed = False
        """It said goodbye."""
        self.dead = False
        self.leaving = False
        """It said that its process exits without closing."""
        self.failure: str | None = None
        self.goodbye_seen = False
        self.remote = False
        self._owed = 0
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"rank {self.name} (host {self.host}, pid {self.pid})"

    @property
    def gone(self) -> bool:
        """Whether nothing needs to be sent to it any more."""
        return self.departed or self.dead

    @property
    def queued(self) -> int:
        """Bytes that wait in this process's memory to be sent to it."""
        return self.control.queued + (0 if self.data is None else self.data.queued)

    def tell(self, data: bytes) -> None:
        """Send a small control frame."""
        self.control.send(data)

    def send_call(self, packet: Packet, *, direct: bool) -> None:
        """Send a collective's frame, and count what is on its way from now on."""
        if direct and self.data is not None:
            if packet.size >= IN_FILE_FROM:
                packet.local()
                self.room.add(packet.file_bytes)
            if queued := self.data.send(packet):
                self.room.add(queued)
        else:
            self.room.add(packet.size)
            self.control.send(packet)

    def used(self, frame: Frame, me: int) -> None:
        """A frame of this peer has been used up: give it the room back, many small ones together."""
        with self._lock:
            self._owed += frame.owed
            if self._owed < min(1 << 20, self.room.bound // 4):
                return
            owed, self._owed = self._owed, 0
        self.control.send(encode(Kind.CREDIT, rank=me, number=owed))

    def flush_data(self) -> int:
        """Send on what the user lane has queued; the bytes that went out."""
        if self.data is None:
            return 0
        went = self.data.flush()
        self.room.add(-went)
        return went

    def close(self) -> None:
        """Let go of the links."""
        self.control.close()
        if self.data is not None:
            self.data.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


Handler = Callable[[int, Any], None]
