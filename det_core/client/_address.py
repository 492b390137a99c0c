"""Where a master is: at the address that is given, else in ``DET_MASTER``, else the one of the home folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from det_core._env import Environment
from det_core.errors import MasterUnreachable


@dataclass(frozen=True)
class Address:
    """How a master is reached.

    Attributes:
        url: its address, in the contract's form (§2.1).
        token: what it demands of its user; None: nothing is sent.
        certificate: a file of certificates to trust, or ``noverify``; None: those of the machine.
        certificate_name: Name in the master's certificate; None for the host's.
        source: who says that it is there, as ``DET_MASTER``; empty: the caller.
    """

    url: str
    token: str | None = None
    certificate: str | None = None
    certificate_name: str | None = None
    source: str = field(default="", compare=False)


def canonical(url: str) -> str:
    """An address with its scheme and port, and no slash at its end (§2.1).

    Raises:
        ValueError: it is no address of a master.
    """
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    odd = any(letter.isspace() or not letter.isprintable() for letter in text)
    wrong = odd or parts.username is not None or parts.query or parts.fragment or port == 0
    if parts.scheme not in ("http", "https") or not parts.hostname or wrong:
        raise ValueError(f"{url!r} is no address of a master: it has the form http://host:port")
    if port is None:
        port = 8080 if "://" not in url else 443 if parts.scheme == "https" else 80
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def locate(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Address | None:
    """Where the master is; None: no address is given, and none of the home folder says where it is. Starts none.

    Args:
        master: its address; None: as the environment says.
        token: the user's token; None: as the environment says, else the home folder, if that master is meant.
        home: the home folder; None: the one of the environment.

    Raises:
        ValueError: the address is none.
    """
    environment = Environment.read()
    folder = master_folder(home, environment)
    own = running(folder)
    url, source = master, ""
    if url is None and home is None and environment.master is not None:
        url, source = environment.master, "DET_MASTER"
    if url is None:
        if own is None:
            return None
        url, source = str(own["url"]), f"the master of {folder.parent}"
    try:
        url = canonical(url)
    except ValueError as e:
        raise ValueError(f"{source}: {e}" if source else str(e)) from None
    if token is None:
        token = environment.user_token
        if own is not None and canonical(str(own["url"])) == url:
            token = kept_token(folder) or token
    return Address(url, token, environment.master_cert, environment.master_cert_name, source)


def reach(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Address:
    """As :func:`locate`, but starts the home folder's own master if no address is given.

    Raises:
        ValueError: the address is none.
        MasterUnreachable: the home folder's master cannot be started.
    """
    environment = Environment.read()
    if master is not None or (home is None and environment.master is not None):
        found = locate(master, token, home)
        assert found is not None
        return found
    from det_core.client._embedded import ensure_master

    where = environment.home if home is None else Path(home).expanduser().absolute()
    url, own = ensure_master(where)
    certificate = environment.master_cert
    return Address(canonical(url), token or own, certificate, environment.master_cert_name, f"the master of {where}")


def master_folder(home: Path | str | None = None, environment: Environment | None = None) -> Path:
    """Where a home folder keeps what belongs to its master."""
    if home is None:
        return (environment or Environment.read()).home / "master"
    return Path(home).expanduser().absolute() / "master"


def running(folder: Path) -> dict[str, Any] | None:
    """What the master of a home folder has written of itself; None: there is none, or it was stopped."""
    try:
        said = json.loads((folder / "master.json").read_text())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("url"), str) else None


def kept_token(folder: Path) -> str | None:
    """The user's token of the master of a home folder."""
    try:
        return (folder / "token").read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as e:
        raise MasterUnreachable(f"the master's token {folder / 'token'} cannot be read: {e.strerror}") from e
