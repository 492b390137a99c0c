"""Address of a master: the one that is given, else ``DET_MASTER``, else that of the home directory's own master."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from det_core._env import Environment
from det_core.errors import MasterUnreachable

DEFAULT_PORTS = {"http": 80, "https": 443}
BARE_PORT = 8080
"""Port of an address without scheme and port, as of a master that was started without ``--port``."""


@dataclass(frozen=True)
class Address:
    """Location of a master, and the user's credentials.

    Attributes:
        url: Address in the contract's form (§2.1).
        token: Token of its user; None sends none.
        certificate: File of certificates to trust, or ``noverify``; None trusts those of the machine.
        certificate_name: Name in the master's certificate; None for the host's.
        source: Origin of the address, such as ``DET_MASTER``; empty for the caller.
    """

    url: str
    token: str | None = None
    certificate: str | None = None
    certificate_name: str | None = None
    source: str = field(default="", compare=False)


def canonical(url: str) -> str:
    """Return an address with its scheme and port, without a slash at its end (§2.1).

    Raises:
        ValueError: If it is not the address of a master.
    """
    has_scheme = "://" in url
    text = url if has_scheme else f"http://{url}"
    parts = urlsplit(text)
    port = _port_of(parts)
    # urlsplit() takes nearly anything; a line feed in a host, say, would end up in a header.
    is_odd = any(letter.isspace() or not letter.isprintable() for letter in text)
    has_more = parts.username is not None or bool(parts.query or parts.fragment)
    if is_odd or has_more or parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0:
        raise ValueError(f"invalid master address {url!r}: expected http://host:port")
    if port is None:
        port = DEFAULT_PORTS[parts.scheme] if has_scheme else BARE_PORT
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def _port_of(parts: SplitResult) -> int | None:
    """Return the port, None if there is none, 0 if it is invalid."""
    try:
        return parts.port
    except ValueError:
        return 0


def locate(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Address | None:
    """Return the address of the master, or None if none is given and the home directory has none. Start none.

    Args:
        master: Address. Defaults to that of the environment.
        token: Token of the user. Defaults to that of the home directory if its own master is meant, else to that of
            the environment.
        home: Home directory. Defaults to that of the environment.

    Raises:
        ValueError: If the address is invalid.
    """
    environment = Environment.read()
    folder = master_folder(home, environment)
    own = running(folder)
    url = master
    source = ""
    # --home names the master of that directory, whatever the environment says.
    if url is None and home is None and environment.master is not None:
        url = environment.master
        source = "DET_MASTER"
    if url is None:
        if own is None:
            return None
        url = str(own["url"])
        source = f"the master of {folder.parent}"
    try:
        url = canonical(url)
    except ValueError as e:
        raise ValueError(": ".join(filter(None, [source, str(e)]))) from None
    if token is None:
        token = environment.user_token
        # The file comes first: a variable of another master would be refused by this one.
        if own is not None and canonical(str(own["url"])) == url:
            token = stored_token(folder) or token
    return Address(url, token, environment.master_cert, environment.master_cert_name, source)


def reach(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Address:
    """Return the address as :func:`locate` does, but start the home directory's own master if none is given.

    Raises:
        ValueError: If the address is invalid.
        MasterUnreachable: If the home directory's master cannot be started.
    """
    environment = Environment.read()
    if master is not None or (home is None and environment.master is not None):
        address = locate(master, token, home)
        assert address is not None
        return address
    from det_core.client._embedded import ensure_master

    folder = master_folder(home, environment).parent
    url, own_token = ensure_master(folder)
    return Address(
        canonical(url),
        token or own_token,
        environment.master_cert,
        environment.master_cert_name,
        f"the master of {folder}",
    )


def master_folder(home: Path | str | None = None, environment: Environment | None = None) -> Path:
    """Return the directory in which a home directory keeps its master's files."""
    if home is None:
        return (environment or Environment.read()).home / "master"
    return Path(home).expanduser().absolute() / "master"


def running(folder: Path) -> dict[str, Any] | None:
    """Return what a home directory's master has recorded of itself, or None if there is none, or it was stopped."""
    try:
        record = json.loads((folder / "master.json").read_text())
    except (OSError, ValueError):
        return None
    if isinstance(record, dict) and isinstance(record.get("url"), str):
        return record
    return None


def stored_token(folder: Path) -> str | None:
    """Return the user's token of a home directory's master, or None if there is none."""
    try:
        return (folder / "token").read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as e:
        raise MasterUnreachable(f"the master's token {folder / 'token'} cannot be read: {e.strerror}") from e
