"""Connections to one master by ``requests``, which another thread can interrupt.

Imported with the first session: requests takes longer to import than all the rest of det_core.core.
"""

from __future__ import annotations

import socket
import ssl
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ConnectTimeout, ProxyError, RequestException, SSLError
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError

from det_core.errors import MasterError

CONNECT_TIMEOUT = 10.0
"""Maximum wait for a connection, in seconds."""
STREAM_CHUNK_BYTES = 1 << 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NoAnswer(Exception):
    """A connection that failed before a whole answer.

    Attributes:
        maybe_sent: Whether the master may have received the request.
    """

    def __init__(self, reason: str, maybe_sent: bool) -> None:
        super().__init__(reason)
        self.maybe_sent = maybe_sent


class Connections:
    """Connections to one master. Thread-safe.

    Args:
        url: Address of the master.
        cert_file: PEM file of certificates to trust beside those of ``requests``, or ``noverify``.
        cert_name: Name in the master's certificate, if it is not the host's.

    Raises:
        MasterError: If ``cert_file`` has no certificates.
    """

    def __init__(self, url: str, cert_file: str | None, cert_name: str | None) -> None:
        host = urlsplit(url).hostname
        # Said with each request, as a session's own would yield to REQUESTS_CA_BUNDLE.
        self._verify = False if cert_file == "noverify" else None
        if cert_file == "noverify":
            warnings.filterwarnings("ignore", message=f"Unverified HTTPS request is being made to host '{host}'")
        self._url = url
        self._open: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        self._interrupted = False
        self._session = requests.Session()
        self._session.auth = lambda request: request  # else requests looks into ~/.netrc, and overwrites the token
        self._session.trust_env = host not in _LOOPBACK  # no proxy to this machine
        adapter = _Adapter(self._pools(), _tls_options(url, cert_file, cert_name))
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def send(self, request: Mapping[str, Any], headers: Mapping[str, str], idle_timeout: float) -> requests.Response:
        """Send a request once.

        Raises:
            NoAnswer: If the connection failed.
            MasterError: If the certificate is not trusted: another attempt would fail, too.
        """
        self._raise_if_interrupted()
        try:
            response = self._session.request(
                **request,
                headers={"User-Agent": "det_core", "Content-Type": "application/json", **headers},
                timeout=(min(CONNECT_TIMEOUT, idle_timeout), idle_timeout),
                verify=self._verify,
                allow_redirects=False,  # a POST would become a GET
            )
            if response.status_code >= 300:
                response.content  # noqa: B018  # read while a failure is still one of the attempt
            return response
        except RequestException as e:
            if isinstance(e, SSLError) and "CERTIFICATE" in str(e).upper():
                text = (
                    f"the certificate of the master at {self._url} is not trusted ({_innermost(e)}): set "
                    "DET_MASTER_CERT_FILE to the PEM file that signs it, and DET_MASTER_CERT_NAME to the name in it if "
                    "that is not the host's"
                )
                raise MasterError(text, detail=text) from e
            # Without a connection, the request certainly did not arrive.
            is_unsent = isinstance(e, ConnectTimeout | ProxyError) or any(
                isinstance(cause, NewConnectionError) for cause in _causes(e)
            )
            raise NoAnswer(_innermost(e), maybe_sent=not is_unsent) from e

    def interrupt(self) -> None:
        """Fail requests that are under way, and all later ones."""
        self._interrupted = True
        for connection in list(self._open):
            if (sock := getattr(connection, "sock", None)) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; a later request makes new ones."""
        self._session.close()
        for connection in list(self._open):  # an error that is still referenced keeps its pool from closing
            connection.close()

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise NoAnswer("the connection to the master is closed", maybe_sent=False)

    def _pools(self) -> dict[str, Any]:
        """Return classes of urllib3's pools by scheme, whose connections this object knows once they are open."""
        owner = self

        class Plain(HTTPConnection):
            def connect(self) -> None:
                owner._open.add(self)
                super().connect()
                owner._raise_if_interrupted()  # an interrupt() in the meantime has not seen the socket

        class Secure(Plain, HTTPSConnection):
            pass

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        return {"http": PlainPool, "https": SecurePool}


def read_lines(response: requests.Response) -> Iterator[bytes]:
    """Yield the lines of a stream, each as soon as it arrives.

    Raises:
        NoAnswer: If the connection fails.
    """
    try:
        yield from response.iter_lines(STREAM_CHUNK_BYTES)
    except RequestException as e:
        raise NoAnswer(_innermost(e), maybe_sent=True) from e


class _Adapter(HTTPAdapter):
    """Adapter of ``requests`` with pools and TLS of its own, through proxies, too."""

    def __init__(self, pools: dict[str, Any], tls: dict[str, Any]) -> None:
        self._pools = pools
        self._tls = tls
        super().__init__()

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **options: Any) -> None:
        super().init_poolmanager(connections, maxsize, block, **options, **self._tls)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options, **self._tls)
        manager.pool_classes_by_scheme = self._pools
        return manager


def _tls_options(url: str, cert_file: str | None, cert_name: str | None) -> dict[str, Any]:
    """Return arguments of urllib3's pools."""
    options: dict[str, Any] = {}
    if cert_name is not None:
        options = {"server_hostname": cert_name, "assert_hostname": cert_name}
    if url.startswith("https") and cert_file not in (None, "", "noverify"):
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(cert_file)
        except (OSError, ssl.SSLError) as e:
            text = f"DET_MASTER_CERT_FILE={cert_file} has no certificates: {e}"
            raise MasterError(text, detail=text) from e
        options["ssl_context"] = context
    return options


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, outermost first."""
    cause: Any = error
    while isinstance(cause, BaseException):
        yield cause
        wrapped = (getattr(cause, "reason", None), *cause.args, cause.__cause__)
        cause = next((each for each in wrapped if isinstance(each, BaseException)), None)


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost cause."""
    *_, cause = _causes(error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return str(text).rpartition(">: ")[2]  # urllib3 puts its objects before some
