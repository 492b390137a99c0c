"""Options of a master, from its command line."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from det_core._env import Environment
from det_core.errors import DetCoreError

MIN_TOKEN_CHARS = 16
"""Minimum length of a token that a user chooses, in characters."""


class OptionError(DetCoreError, ValueError):
    """A master cannot be started with these options; the message says what to change."""


@dataclass(frozen=True)
class Options:
    """Options of a master.

    Attributes:
        home: Directory that holds everything it keeps; its own files are in ``home/master``.
        host: Address to listen on.
        port: Port to listen on; 0 for the last one, or else a free one.
        slots: Number of trials of one slot that run at a time; None for the last number that a user chose, or else
            the GPUs of this machine, or 1.
        database: URL of the database, or None for a SQLite file in ``folder``.
        token_file: File with the user's token, or None for ``folder/token``, which is made if it does not exist.
        log_file: File for the log and all output, or None for stderr.
        allow_hosts: Names by which requests may address it besides its own, such as that of a proxy.
        start_new: Whether an empty database may begin beside what an earlier master knew, which is moved away.
        master_url: URL at which trials reach it; known once it listens.
        cluster_id: Its permanent name; known once its directory is read.
        early_exit_grace: Time that a trial may live on after it has reported an early exit, in seconds.
        unmanaged_timeout: Time without a sign of life after which an unmanaged trial counts as dead, in seconds.
        sweep_interval: Interval at which unmanaged trials are checked, in seconds.
    """

    home: Path
    host: str = "127.0.0.1"
    port: int = 0
    slots: int | None = None
    database: str | None = None
    token_file: Path | None = None
    log_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    start_new: bool = False
    master_url: str = "http://127.0.0.1:8080"
    cluster_id: str = "det_core"
    early_exit_grace: float = 10.0
    unmanaged_timeout: float = 300.0
    sweep_interval: float = 60.0

    cluster_name: ClassVar[str] = "det_core"
    agent_id: ClassVar[str] = "local"
    """Name of the machine that the engine runs trials on."""
    version: ClassVar[str] = "0.37.0"
    """Release of Determined whose protocol the master speaks."""

    @property
    def folder(self) -> Path:
        """Directory of the master's own files."""
        return self.home / "master"

    @property
    def allocations(self) -> Path:
        """Directory with the folders of allocations, each of which has the log of a run."""
        return self.folder / "allocations"

    @property
    def default_storage(self) -> dict[str, Any]:
        """Checkpoint storage of experiments that name none, as in a configuration."""
        return {"type": "directory", "container_path": str(self.home / "checkpoints")}

    def check(self) -> None:
        """Check that only its user can use the master.

        Raises:
            OptionError: If other machines could reach it without a secret that its user chose, or if the file with the
                secret cannot be used.
        """
        if self.token_file is not None:
            _check_token(self.token_file)
        elif not _is_loopback(self.host):
            raise OptionError(
                f"{self.host} is reached from other machines: give --token-file FILE with a secret of at least "
                f"{MIN_TOKEN_CHARS} characters, which clients show as DET_USER_TOKEN; or listen on 127.0.0.1"
            )


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return the options of a command line.

    Args:
        argv: Arguments after the program's name. Defaults to those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m det_core.master", description="Run a master in the foreground, until SIGTERM or Ctrl-C."
    )
    parser.add_argument("--home", type=Path, help="where it keeps everything (default: DET_CORE_HOME)")
    parser.add_argument("--host", default=Options.host, help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: the last one, else a free one)")
    parser.add_argument(
        "--slots", type=int, help="trials of one slot at a time (default: as last time, else the GPUs there are, or 1)"
    )
    parser.add_argument(
        "--db", dest="database", metavar="URL", help="the database (default: a SQLite file in HOME/master)"
    )
    parser.add_argument("--token-file", type=Path, help="a file with the user's token (default: HOME/master/token)")
    parser.add_argument("--log-file", type=Path, help="write what happens into this file, not to stderr")
    parser.add_argument(
        "--allow-host",
        dest="allow_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which it is reached, as through a proxy (repeat for more)",
    )
    parser.add_argument(
        "--new",
        dest="start_new",
        action="store_true",
        help="start an empty database beside what an earlier one knew, which is moved to HOME/unknown",
    )
    values = vars(parser.parse_args(argv))
    if not 0 <= values["port"] < 65536:
        parser.error(f"--port {values['port']}: expected 0 to 65535")
    if values["slots"] is not None and values["slots"] < 0:
        parser.error(f"--slots {values['slots']}: expected 0 or more")
    home = values.pop("home")
    home = home.expanduser().absolute() if home else Environment.read().home
    allow_hosts = tuple(values.pop("allow_hosts"))
    return Options(home, allow_hosts=allow_hosts, **values)


def _is_loopback(host: str) -> bool:
    try:
        addresses = {ipaddress.ip_address(host)}
    except ValueError:
        try:
            addresses = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError as e:
            raise OptionError(f"--host {host}: {e}") from None
    return all(address.is_loopback for address in addresses)


def _check_token(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise OptionError(f"--token-file {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise OptionError(f"--token-file {path} can be read by others: chmod 600 {path}")
    if len(text) < MIN_TOKEN_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        raise OptionError(f"--token-file {path}: expected one word of at least {MIN_TOKEN_CHARS} ASCII characters")
