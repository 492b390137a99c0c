"""Names under which a request may address the master.

A page of a foreign site can let its own name point to this machine (DNS rebinding). A browser then sends the page's
requests to the master and regards the answers as the page's own; the Host header still has the foreign name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable


class OwnHosts:
    """Names of this master.

    Args:
        names: names beside localhost and that of the machine, such as the one that a proxy is reached by.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"", "localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def __contains__(self, host: str) -> bool:
        """Return whether a Host header names this master: IP addresses always do, since no site can own one."""
        name = _without_port(host).lower().rstrip(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
