"""Ports where ranks meet, and whether another node can be reached."""

from __future__ import annotations

import errno
import os
import socket

from ._hosts import CannotStart, Layout


def reserve_master_port(layout: Layout) -> int:
    """Return the port where the ranks meet; on the first node, keep it reserved as long as this process lives."""
    if layout.node_rank:
        return layout.port
    reserved = reserve(layout.port)
    port = int(reserved.getsockname()[1])
    reserved.detach()  # the descriptor stays open, here and in the supervisor
    return port


def reserve(port: int = 0) -> socket.socket:
    """Return a socket that reserves a port of this node until it is closed.

    Args:
        port: port number; 0 picks a free one, so that two jobs on one node do not meet.

    Raises:
        CannotStart: If another process listens on the port, or it may not be used.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Bound but not listening: with SO_REUSEADDR on both sockets the kernel lets one of them listen, which rank 0 does.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", port))
    except OSError as e:
        reserved.close()
        cause = f"cannot be used: {e.strerror}"
        if e.errno == errno.EADDRINUSE:
            cause = "is in use on this node"
        raise CannotStart(f"port {port} {cause}; pass another --master-port on every node") from e
    return reserved


def check_reachable(host: str, port: int, timeout: float = 10.0) -> None:
    """Check that another node answers, so that a wrong address is one line and not a timeout of the ranks.

    Args:
        host: name or address of the node.
        port: any port that the network lets through. Nothing needs to listen there yet.
        timeout: maximum wait in seconds.

    Raises:
        CannotStart: If the host has no address, or no node answers there.
    """
    try:
        socket.create_connection((host, port), timeout).close()
    except ConnectionError:  # refused by a node that is up: its ranks may start later
        return
    except OSError as e:
        cause = e.strerror or str(e)
        # getaddrinfo's numbers are not errno's.
        if e.errno and not isinstance(e, socket.gaierror):
            cause = os.strerror(e.errno)
        raise CannotStart(f"cannot reach host {host} from {socket.gethostname()}: {cause}") from e
