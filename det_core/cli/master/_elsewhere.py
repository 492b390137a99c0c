"""The addresses at which other machines reach a master of this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that nobody has: which of this machine's own would lead there is what others know it by."""


def addresses_elsewhere(folder: Path) -> list[str]:
    """The addresses for other machines of the master that runs in ``folder``; none if it listens for its own alone."""
    from det_core.client._address import running

    said = running(folder)
    if said is None:
        return []
    listens, port = str(said.get("listens", "127.0.0.1")), urlsplit(str(said["url"])).port
    hosts = _own_names() if listens in ("0.0.0.0", "::", "") else [] if _is_loopback(listens) else [listens]
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in hosts]


def _own_names() -> list[str]:
    """What others may know this machine by: its addresses, the one of its way out first, and its name."""
    found = [address for family, outside in _OUTSIDE if (address := _own_address(family, outside))]
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [*dict.fromkeys(address for address in found if not _is_loopback(address)), name]


def _own_address(family: int, outside: str) -> str | None:
    """The address that packets to ``outside`` would bear; none is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((outside, 9))
            return str(asked.getsockname()[0])
    except OSError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
