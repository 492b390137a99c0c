"""Several containers of a master of the wire contract's kind, of which the first one starts all ranks over ssh.

Each container runs the same command. The others serve ssh until the master ends them, which it does once the first one
has ended (section 14.2).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from typing import NoReturn

from det_core._env import Environment
from det_core._info import ClusterInfo

from .._words._options import CannotStart, UsageError

PATIENCE = 20.0
"""Seconds for the servers of all containers to be up."""
_SSHD = ("/usr/sbin/sshd", "-f", "/run/determined/ssh/sshd_config", "-D")


def ssh_port() -> int:
    """The port of these servers."""
    text = os.environ.get("DTRAIN_SSH_PORT") or "12350"
    if not text.isdigit():
        raise UsageError(f"DTRAIN_SSH_PORT={text!r}: expected a port")
    return int(text)


def become_ssh_server(info: ClusterInfo, environment: Environment) -> NoReturn:
    """Tell the master that this container is done when the others are, and serve ssh in place of this process.

    Raises:
        UsageError: a variable is missing.
        CannotStart: there is no server.
        MasterError, MasterUnreachable: the master does not want to know.
    """
    from det_core.backend.rest import MasterSession, credentials  # takes long, and is for this alone

    resources = os.environ.get("DET_RESOURCES_ID")
    if not resources:
        raise UsageError("DET_RESOURCES_ID is not set, by which the master knows this container")
    session = MasterSession(
        info.master_url,
        credentials(environment.session_token or info.session_token, environment.user_token),
        cert_file=environment.master_cert or info.master_cert_file,
        cert_name=environment.master_cert_name or info.master_cert_name,
        patience=environment.master_timeout,
    )
    try:
        session.call("POST", f"/api/v1/allocations/{info.allocation_id}/resources/{resources}/daemon", {})
    finally:
        session.close()
    try:
        os.execv(_SSHD[0], [*_SSHD, "-p", str(ssh_port())])
    except OSError as e:
        raise CannotStart(f"cannot run {_SSHD[0]}: {e.strerror}") from e


def wait_for_ssh_servers(hosts: Iterable[str], port: int) -> None:
    """Return when each host's server has greeted.

    Raises:
        CannotStart: one does not, in :data:`PATIENCE`.
    """
    until = time.monotonic() + PATIENCE
    for host in hosts:
        while not _greets(host, port):
            if time.monotonic() > until:
                raise CannotStart(f"no ssh server has come up at {host}, port {port}, in {PATIENCE:g} s")
            time.sleep(0.1)


def _greets(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 1) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False
