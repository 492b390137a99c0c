"""A master: its address, the requests of a user to it, and its errors in a user's words."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from det_core._env import Environment
from det_core._info import canonical_url
from det_core.errors import MasterDenied, MasterError, MasterUnreachable
from det_core.protocol import IDLE_TIMEOUT, MasterSession

RETRY_TIMEOUT = 2.0
"""Time during which a request is sent again if the connection fails, in seconds: as long as a master takes to start."""
TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED", "DELETE_FAILED")
"""States of experiments and trials that have ended for good."""


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


class Master:
    """A session with a master.

    Args:
        address: Address of the master, with the user's credentials.
        timeout: Time during which a request is sent again if the connection fails, in seconds; 0 sends it once.
            Defaults to :data:`RETRY_TIMEOUT`.
        idle_timeout: Maximum wait for the next byte of an answer, in seconds.
    """

    def __init__(self, address: Address, *, timeout: float | None = None, idle_timeout: float = IDLE_TIMEOUT) -> None:
        if timeout is None:
            timeout = RETRY_TIMEOUT
        self.address = address
        self._idle_timeout = idle_timeout
        self._session = MasterSession(
            address.url,
            user_token=address.token,
            cert_file=address.certificate,
            cert_name=address.certificate_name,
            timeout=timeout,
        )
        # Functions of det_core.client open sessions that nobody closes, and cycles in requests would keep the sockets.
        weakref.finalize(self, self._session.close)

    def __repr__(self) -> str:
        return f"Master({self.url!r})"

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The master's address."""
        return self.address.url

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def get(self, path: str, *, wait: float = 0.0, **query: Any) -> Any:
        """Send a GET request; see :meth:`request`."""
        return self.request("GET", path, query, wait=wait)

    def post(self, path: str, body: Any = None, *, once: bool = False) -> Any:
        """Send a POST request; see :meth:`request`."""
        return self.request("POST", path, body=body, once=once)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Any = None,
        wait: float = 0.0,
        once: bool = False,
    ) -> Any:
        """Send a request, again if the connection fails, and return the answer's JSON.

        Args:
            method: HTTP method.
            path: Path below ``/api/v1/``.
            query: Parameters; those that are None are left out.
            body: Value sent as JSON; None sends no body.
            wait: Time that the master may take to answer besides the idle timeout, in seconds.
            once: Whether not to send the request again once it may have arrived.

        Raises:
            MasterUnreachable: If no master answers there.
            MasterDenied: If the master does not accept the token.
            UnknownToMaster: If the master has no such object.
            MasterError: If the request was rejected otherwise.
        """
        with self._in_users_words():
            return self._session.call(
                method,
                _route(path),
                body,
                params=_parameters(query),
                idle_timeout=self._idle_timeout + wait,
                once=once,
            )

    @contextmanager
    def lines(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the results in a stream, each as soon as it arrives.

        Args:
            path: As for :meth:`request`.
            query: As for :meth:`request`.

        Raises:
            MasterError: As :meth:`request` does, and if the stream ends early.
        """
        # Errors of other requests in the caller's block are in these words already, and stay as they are.
        with self._in_users_words():
            query = _parameters(query)
            with self._session.stream(_route(path), query, idle_timeout=self._idle_timeout) as results:
                yield results

    @contextmanager
    def _in_users_words(self) -> Iterator[None]:
        """Reword errors of requests: without method and route, and with what to do about them."""
        try:
            yield
        except MasterUnreachable as e:
            source = ""
            if self.address.source:
                source = f" ({self.address.source})"
            cause = e.detail[:1].lower() + e.detail[1:]  # it follows a colon
            raise MasterUnreachable(
                f"no master answers at {self.url}{source}: {cause}", detail=cause, maybe_applied=e.maybe_applied
            ) from e
        except MasterDenied as e:
            if e.status != 401:
                raise MasterDenied(e.detail, e.status) from e
            problem = "this one is wrong" if self.address.token else "there was none"
            raise MasterDenied(
                f"the master at {self.url} expects its user's token, and {problem}: set DET_USER_TOKEN to the content "
                "of the file master/token in its home directory",
                401,
            ) from e
        except MasterError as e:
            if str(e) == e.detail:
                raise
            raise type(e)(e.detail, e.status) from e


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


def list_rows(master: Master, path: str, **query: Any) -> Iterator[Any]:
    """Yield the rows of a list, which a master answers in pages.

    Args:
        master: Master to ask.
        path: Path below ``/api/v1/``; its last part is the key of the rows.
        query: Parameters; those that are None are left out.
    """
    key = path.rpartition("/")[2]
    count = 0
    while True:
        page = master.get(path, offset=count, **query)
        yield from page[key]
        count += len(page[key])
        if not page[key] or count >= (page.get("pagination") or {}).get("total", 0):
            return


def _route(path: str) -> str:
    return f"/api/v1/{quote(path)}"


def _parameters(query: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return query parameters with booleans as the wire contract spells them."""
    parameters = dict(query or {})
    for name, value in parameters.items():
        if isinstance(value, bool):
            parameters[name] = str(value).lower()
    return parameters
