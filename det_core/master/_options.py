"""What a master is started with, and what of it is refused."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from det_core._env import Environment
from det_core.errors import DetCoreError

SHORTEST_TOKEN = 16
"""Characters that a token of the user's own must have."""


class OptionError(DetCoreError, ValueError):
    """A master cannot be started like that; the message says what to change."""


@dataclass(frozen=True)
class Options:
    """How a master is started.

    Attributes:
        home: the folder that holds all that it keeps; its own files lie in ``home/master``.
        host: the address to listen on.
        port: the port to listen on; 0: that of the time before, else one that is free.
        slots: how many trials of one slot run at a time; None: as many as the time before if somebody chose then, else
            the GPUs of this machine, or one.
        database: the URL of the store; None: a SQLite file in ``folder``.
        token_file: the file with the user's token; None: ``folder/token``, made when there is none.
        log_file: where to write what happens, also what goes to stdout and stderr; None: to stderr.
        allow_hosts: names by which requests may address it beside its own, such as a proxy's.
        start_new: Whether an empty database may begin beside what an earlier one knew, which is moved away.
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

    @property
    def folder(self) -> Path:
        """Where the master's own files lie."""
        return self.home / "master"

    def check(self) -> None:
        """Look whether a master may be started like that.

        Raises:
            OptionError: it would be reached from other machines without a secret that its user chose, or the file
                with the secret is not to be used.
        """
        if self.token_file is not None:
            _check_token(self.token_file)
        elif not _is_loopback(self.host):
            raise OptionError(
                f"{self.host} is reached from other machines: give --token-file FILE with a secret of at least "
                f"{SHORTEST_TOKEN} characters, which clients show as DET_USER_TOKEN; or listen on 127.0.0.1"
            )


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options on a command line; None: on this process's."""
    parser = argparse.ArgumentParser(
        prog="python -m det_core.master", description="Run a master in the foreground, until SIGTERM or Ctrl-C."
    )
    parser.add_argument("--home", type=Path, help="where it keeps everything (default: DET_CORE_HOME)")
    parser.add_argument("--host", default=Options.host, help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: the last one, else a free one)")
    parser.add_argument(
        "--slots", type=int, help="trials of one slot at a time (default: as last time, else the GPUs there are, or 1)"
    )
    parser.add_argument("--db", metavar="URL", help="the database (default: a SQLite file in HOME/master)")
    parser.add_argument("--token-file", type=Path, help="a file with the user's token (default: HOME/master/token)")
    parser.add_argument("--log-file", type=Path, help="write what happens into this file, not to stderr")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which it is reached, as through a proxy (repeat for more)",
    )
    parser.add_argument(
        "--new",
        action="store_true",
        help="start an empty database beside what an earlier one knew, which is moved to HOME/unknown",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.port < 65536:
        parser.error(f"--port {args.port}: expected 0 to 65535")
    if args.slots is not None and args.slots < 0:
        parser.error(f"--slots {args.slots}: expected 0 or more")
    home = args.home.expanduser().absolute() if args.home else Environment.read().home
    return Options(
        home,
        args.host,
        args.port,
        args.slots,
        args.db,
        args.token_file,
        args.log_file,
        tuple(args.allow_host),
        args.new,
    )


def _is_loopback(host: str) -> bool:
    try:
        found = {ipaddress.ip_address(host)}
    except ValueError:
        try:
            found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError as e:
            raise OptionError(f"--host {host}: {e}") from None
    return all(address.is_loopback for address in found)


def _check_token(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise OptionError(f"--token-file {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise OptionError(f"--token-file {path} can be read by others: chmod 600 {path}")
    if len(text) < SHORTEST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise OptionError(f"--token-file {path}: expected one word of at least {SHORTEST_TOKEN} ASCII characters")
