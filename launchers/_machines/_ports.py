"""Ports for the frameworks to meet at."""

from __future__ import annotations

import errno
import os
import socket

from .._words._options import CannotStart


def free_port() -> int:
    """A port that nothing listens on now, for a job on this machine alone: so two jobs do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(port: int) -> None:
    """Raise CannotStart if something on this machine listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as e:
            why = "is in use on this machine" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
            raise CannotStart(f"port {port} {why}: --master-port PORT takes another one, on every machine") from e


def check_reachable(host: str, port: int, seconds: float = 10) -> None:
    """Raise CannotStart if ``host`` has no address, or no machine answers there.

    That nothing listens on ``port`` yet is no obstacle: the ranks there may come later.
    """
    try:
        socket.create_connection((host, port), seconds).close()
    except ConnectionError:
        return
    except OSError as e:
        why = os.strerror(e.errno) if e.errno and not isinstance(e, socket.gaierror) else e.strerror or str(e)
        raise CannotStart(f"host {host} cannot be reached from {socket.gethostname()}: {why}") from e
