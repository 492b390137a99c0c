"""Files of a master in its home directory: its token, its name, its port, its slots, and where it listens."""

from __future__ import annotations

import json
import random
import secrets
import socket
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import det_core
from det_core._standalone.files import write_atomic
from det_core.errors import StoreError
from det_core.storage import Owner

PORTS = range(18_000, 30_000)
"""Ports that a master chooses from. They are below those that systems lend to outgoing connections, so that its last
port stays free while it is down, and running trials find it again."""


@dataclass(frozen=True)
class HomeFiles:
    """Files in ``folder``, which only its owner may read."""

    folder: Path

    def prepare(self) -> None:
        """Make the directory."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def token(self, source: Path | None) -> str:
        """Return the user's token, which is kept in ``token``.

        Args:
            source: File with a token that the user chose; None for one that is made the first time.
        """
        path = self.folder / "token"
        if source is not None:
            # Kept as well, so that the commands of this machine find it.
            text = source.read_text().strip()
            if not path.exists() or path.read_text().strip() != text:
                _write(path, text + "\n")
            return text
        if not path.exists():
            _write(path, secrets.token_urlsafe(32) + "\n")
        return path.read_text().strip()

    def cluster_id(self) -> str:
        """Return the master's permanent name, which is made the first time."""
        path = self.folder / "cluster_id"
        if not path.exists():
            _write(path, str(uuid.uuid4()) + "\n")
        return path.read_text().strip()

    def bind(self, host: str, port: int) -> socket.socket:
        """Return a listening socket.

        Args:
            host: Address.
            port: Port; 0 for the last one if it is free, or else any other.

        Raises:
            OSError: If it cannot be bound; the message names address and port.
        """
        if port:
            return _listen(host, port)
        others = random.SystemRandom().sample(PORTS, 20)
        # The last one first: trials that still run know the master by it.
        for candidate in [*self._last_port(), *others]:
            try:
                return _listen(host, candidate)
            except OSError as e:
                error = e
        raise error

    def last_slots(self) -> int | None:
        """Return the number of slots that a user chose last, or None."""
        try:
            return max(int((self.folder / "slots").read_text()), 0)
        except (OSError, ValueError):
            return None

    def keep_slots(self, slots: int) -> None:
        """Record the number of slots that a user chose, for the next start."""
        _write(self.folder / "slots", f"{slots}\n")

    def announce(
        self, url: str, port: int, cluster_id: str, *, host: str = "127.0.0.1", slots_as_last_time: bool = False
    ) -> None:
        """Write where the master listens; :meth:`withdraw` removes it.

        Args:
            url: URL of the master.
            port: Port, which the next master prefers.
            cluster_id: Permanent name of the master.
            host: Address that it listens on.
            slots_as_last_time: Whether the number of its slots was chosen at an earlier start.
        """
        owner = Owner.current("master", 0)
        record = {
            "url": url,
            "listens": host,
            "pid": owner.pid,
            "start_time": owner.started,
            "host": owner.host,
            "version": det_core.__version__,
            "cluster_id": cluster_id,
            "slots_as_last_time": slots_as_last_time,
        }
        # The port stays when the master goes; the other file says that there is one.
        _write(self.folder / "port", f"{port}\n")
        _write(self.folder / "master.json", json.dumps(record) + "\n")

    def withdraw(self) -> None:
        """Remove what :meth:`announce` wrote, but for the port."""
        (self.folder / "master.json").unlink(missing_ok=True)

    def check_new(self, *, start_new: bool) -> None:
        """Refuse an empty database beside what an earlier one knew, or move that to ``unknown/``.

        A master ends and deletes allocations that its database does not have.

        Args:
            start_new: Whether to move it, which ends and deletes nothing.

        Raises:
            StoreError: If it is not to be moved.
        """
        home = self.folder.parent
        known = (home / "checkpoints", self.folder / "allocations", self.folder / "contexts")
        full = [path for path in known if path.is_dir() and any(path.iterdir())]
        if not full:
            return
        unknown = home / "unknown"
        if not start_new:
            raise StoreError(
                f"the master's database is empty, but an earlier one knew what is in {', '.join(map(str, full))}: "
                f"restore the database, or start a new one with --new, which moves these to {unknown}"
            )
        unknown.mkdir(mode=0o700, exist_ok=True)
        # A directory of its own for each time, so that nothing is overwritten.
        target = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=unknown))
        for path in full:
            path.rename(target / path.name)

    def _last_port(self) -> list[int]:
        try:
            return [int((self.folder / "port").read_text())]
        except (OSError, ValueError):
            return []


def reachable(host: str) -> str:
    """Return the address, for a URL, at which this machine's processes reach a master that listens on ``host``."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    if ":" in host:  # IPv6
        return f"[{host}]"
    return host


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of the last master may linger for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Only now nobody else can have the port. Who connects before the master is ready waits.
        listener.listen(2048)
    except OSError as e:
        listener.close()
        raise OSError(e.errno, f"the master cannot listen on {host} port {port}: {e.strerror}") from None
    return listener


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    write_atomic(path, text.encode(), durable=False, mode=0o600)
