"""Address of a master: the one that is given, else ``DET_MASTER``, else that of the home directory's own master."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core._info import canonical_url
from det_core.errors import MasterUnreachable


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
        url = canonical_url(url)
    except ValueError as e:
        raise ValueError(": ".join(filter(None, [source, str(e)]))) from None
    if token is None:
        token = environment.user_token
        # The file comes first: a variable of another master would be refused by this one.
        if own is not None and canonical_url(str(own["url"])) == url:
            token = stored_token(folder) or token
    return Address(url, token, environment.master_cert, environment.master_cert_name, source)


def reach(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Address:
    """Return the address as :func:`locate` does, but start the home directory's own master if none is given.

    Raises:
        ValueError: If the address is invalid.
        MasterUnreachable: If the home directory's master cannot be started.
    """
    if master is None and (home is not None or Environment.read().master is None):
        from det_core.client._embedded import ensure_master

        ensure_master(master_folder(home).parent)
    address = locate(master, token, home)
    if address is None:
        raise MasterUnreachable(f"the master of {master_folder(home).parent} was stopped just now")
    return address


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
