"""The files of a master in its home folder: its token, its name, its port, its slots, and where it listens."""

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

from det_core._standalone.files import write_atomic
from det_core.errors import StoreError
from det_core.storage import Owner

PORTS = range(18_000, 30_000)
"""Ports that a master picks from: below those that systems lend to outgoing connections, so that the one it had stays
free for it while it is down, and running trials find it again."""


@dataclass(frozen=True)
class HomeFiles:
    """The files in ``folder``, which is only for its owner to look into."""

    folder: Path

    def prepare(self) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def token(self, given: Path | None) -> str:
        """The user's token: that of the file ``given``, or one made the first time. It is kept in ``token``."""
        path = self.folder / "token"
        if given is not None:
            text = given.read_text().strip()
            if not path.exists() or path.read_text().strip() != text:
                _write(path, text + "\n")
            return text
        if not path.exists():
            _write(path, secrets.token_urlsafe(32) + "\n")
        return path.read_text().strip()

    def cluster_id(self) -> str:
        """The master's lasting name, made the first time."""
        path = self.folder / "cluster_id"
        if not path.exists():
            _write(path, str(uuid.uuid4()) + "\n")
        return path.read_text().strip()

    def bind(self, host: str, port: int) -> socket.socket:
        """A socket to listen on.

        Args:
            host: the address.
            port: the port; 0: the one of the time before if it is free, else any other.

        Raises:
            OSError: it cannot be had; the message names address and port.
        """
        if port:
            return _bound(host, port)
        wanted = random.SystemRandom().sample(PORTS, 20)
        for candidate in [*self._last_port(), *wanted]:
            try:
                return _bound(host, candidate)
            except OSError as e:
                error = e
        raise error

    def last_slots(self) -> int | None:
        """How many slots somebody has chosen last; None: nobody has."""
        try:
            return max(int((self.folder / "slots").read_text()), 0)
        except (OSError, ValueError):
            return None

    def announce(
        self,
        url: str,
        port: int,
        version: str,
        cluster_id: str,
        slots: int | None = None,
        *,
        again: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        """Tell where the master listens; :meth:`withdraw` takes it back.

        Args:
            url, port, version, cluster_id: of this master.
            slots: how many it was told to have, to be kept for the next one; None: nobody has said.
            again: this is what an earlier one was told.
            host: the address that it listens on.
        """
        me = Owner.current("master", 0)
        told = {
            "url": url,
            "listens": host,
            "pid": me.pid,
            "start_time": me.started,
            "host": me.host,
            "version": version,
            "cluster_id": cluster_id,
            "slots_as_last_time": again,
        }
        _write(self.folder / "port", f"{port}\n")
        if slots is not None and not again:
            _write(self.folder / "slots", f"{slots}\n")
        _write(self.folder / "master.json", json.dumps(told) + "\n")

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
        target = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=unknown))
        for path in full:
            path.rename(target / path.name)

    def withdraw(self) -> None:
        """The master listens no more."""
        (self.folder / "master.json").unlink(missing_ok=True)

    def _last_port(self) -> list[int]:
        try:
            return [int((self.folder / "port").read_text())]
        except (OSError, ValueError):
            return []


def reachable(host: str) -> str:
    """The address at which what runs on this machine reaches a master that listens on ``host``, for a URL."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)  # only now nobody else can have the port; who connects waits
    except OSError as e:
        bound.close()
        raise OSError(e.errno, f"the master cannot listen on {host} port {port}: {e.strerror}") from None
    return bound


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    write_atomic(path, text.encode(), durable=False, mode=0o600)
